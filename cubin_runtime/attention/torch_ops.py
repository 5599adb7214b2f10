"""Operators as ``torch.library`` ops, through which calls go that torch traces, compiles, exports or intercepts.

An op is an operator whose optional output is given: it writes into its outputs and returns nothing, as its schema says.
In a capture its scratch comes from torch's allocator, so a graph that torch captures owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import UsageError
from ..values import dataclass
from .fast_path.notes import note_made

NAMESPACE = "cubin_runtime"
_SCALE = "Scale"  # a number, or a tensor on the device: two arguments of an op
_PAIR = "Tensor[]"  # K and V, or one tensor


class TorchScratch:
    """A value in the place of a workspace that tells where an op takes its scratch from."""


TORCH_SCRATCH = TorchScratch()  # memory of torch's allocator, for one run
RUNTIME_SCRATCH = TorchScratch()  # where a call without a workspace takes it from


def torch_bytes(size: int, device: int, *, zeroed: bool) -> Any:
    """A tensor of so many bytes, made anew for each call."""
    import torch

    kind = torch.zeros if zeroed else torch.empty
    make = partial(kind, size, dtype=torch.uint8, device=torch.device("cuda", device))
    return note_made(make(), make)


@dataclass(frozen=True, slots=True)
class TorchOp:
    """An operator's op: ``kinds`` gives the type of each argument that it has, by name, as schemas write it.

    ``written`` are the tensors that it fills. ``complete`` makes those that a call leaves out, among its arguments by
    name, and gives what the call returns. A scale is a number and an optional tensor. ``fixed`` is what the operator
    gets for arguments that are not among ``kinds``; a call must have them so, but for those ``dropped``.
    """

    name: str
    kinds: Mapping[str, str]
    written: Sequence[str]
    fixed: Mapping[str, Any]
    complete: Callable[[dict[str, Any]], Any]
    dropped: frozenset[str] = frozenset({"workspace"})

    @property
    def schema(self) -> str:
        """The op's schema."""
        parts, aliases = [], iter("abcdefgh")
        for name, kind in self.kinds.items():
            if kind == _SCALE:
                parts += [f"float? {name}", f"Tensor? {name}_tensor"]
            elif name in self.written:
                parts.append(f"{kind.replace('Tensor', f'Tensor({next(aliases)}!)')} {name}")
            else:
                parts.append(f"{kind} {name}")
        return f"{self.name}({', '.join(parts)}) -> ()"

    def define(self, operator: Callable[..., Any]) -> None:
        """Register it with torch; ``operator`` is what it calls."""
        import torch

        captures = torch.cuda.is_current_stream_capturing

        def run(*packed: Any) -> None:
            operator(**self._arguments(packed, TORCH_SCRATCH if captures() else RUNTIME_SCRATCH))

        _library().define(self.schema)
        _library().impl(self.name, run, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", lambda *_, **__: None, lib=_library())

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the op with an operator's arguments by name; the output. The dict is this function's own.

        Raises:
            UsageError: an argument that it does not have is given, or a tensor requires grad.
        """
        import torch

        result = self.complete(arguments)
        packed: list[Any] = []
        for name, kind in self.kinds.items():
            value = arguments[name]
            parts = value if isinstance(value, (tuple, list)) else (value,)
            if any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts) and torch.is_grad_enabled():
                raise UsageError(
                    "requires grad, but this operator has no backward pass: call it under torch.no_grad()",
                    argument=name,
                )
            if kind == _SCALE:
                is_tensor = isinstance(value, torch.Tensor)
                packed.append(None if is_tensor or value is None else float(value))
                packed.append(value if is_tensor else None)
            elif kind == _PAIR:
                packed.append(list(parts))
            else:
                packed.append(value)
        for name, value in arguments.items():
            if name not in self.kinds and name not in self.dropped and value != self.fixed[name]:
                raise UsageError(
                    f"given to a call that torch traces, expected {self.fixed[name]!r} there", argument=name
                )
        getattr(torch.ops.cubin_runtime, self.name)(*packed)
        return result

    def _arguments(self, packed: Sequence[Any], scratch: Any) -> dict[str, Any]:
        """The operator's arguments by name, from those of the op in order."""
        arguments, values = dict[str, Any](), iter(packed)
        for name, kind in self.kinds.items():
            value = next(values)
            if kind == _SCALE:
                tensor = next(values)
                value = value if tensor is None else tensor
            elif kind == _PAIR:
                value = value[0] if len(value) == 1 else tuple(value)
            arguments[name] = value
        fixed = {name: scratch if value is TORCH_SCRATCH else value for name, value in self.fixed.items()}
        return arguments | fixed


_libraries: list[Any] = []


def _library() -> Any:
    if not _libraries:
        import torch

        library: Any = torch.library  # its classes have no types
        _libraries.append(library.Library(NAMESPACE, "DEF"))
    return _libraries[0]
