"""The ops of decodes, from their declarations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from .decode_operator import SCALES, DecodeOperator
from .torch_ops import TORCH_SCRATCH, TorchOp

# Kinds of options -> those of a torch op's arguments, which may be symbolic.
_KINDS = {"bool": "bool", "float": "float", "int": "SymInt", "str": "str"}
_NO_OPTIONS = {"workspace": TORCH_SCRATCH, "stream": None, "runtime": None}


class _Form(NamedTuple):
    """The values that an output follows from."""

    shape: tuple[int, ...]
    dtype: str


def torch_op(operator: DecodeOperator) -> TorchOp:
    """The op of a decode: its tensors as declared, the bound, and its options."""

    def complete(arguments: dict[str, Any]) -> Any:
        import torch

        q = arguments["q"]
        if arguments["out"] is None:
            word = str(q.dtype).removeprefix("torch.")
            shape, dtype = operator.output(_Form(q.shape, word))
            arguments["out"] = torch.empty(shape, dtype=getattr(torch, dtype or word), device=q.device)
        return arguments["out"]

    kinds_of = {item.name: str(item.type) for item in fields(operator.options_type)}
    kinds = {arg.name: "Tensor?" if arg.optional else "Tensor" for arg in operator.tensors}
    kinds |= dict.fromkeys((*SCALES, *operator.kv_scales), "Scale")
    kinds |= {"max_seq_len": "SymInt", **{name: _kind(kinds_of[name]) for name in operator.options}}
    written = tuple(arg.name for arg in operator.tensors if arg.written)
    return TorchOp(operator.name, kinds, written, _NO_OPTIONS, complete)


def _kind(annotation: str) -> str:
    required = annotation.removesuffix(" | None")
    return _KINDS[required] + ("" if required == annotation else "?")
