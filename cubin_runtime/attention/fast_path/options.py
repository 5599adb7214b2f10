"""Arguments of a call other than tensors: numbers that a launch depends on, other libraries' values, streams."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...launch.streams import stream_handle
from ...values import dataclass
from .guards import is_plain
from .notes import Notes


@dataclass(frozen=True, slots=True)
class Signature:
    """The meaning of an operator's arguments, beyond tensors and fixed options.

    ``scales`` are the arguments that numbers among the launch's values are products of, ``bound`` is the one that
    bounds the lengths, ``memory`` those in which regions are placed, ``contents`` those that the full path may read.
    """

    parameters: tuple[str, ...]
    scales: tuple[str, ...] = ()
    bound: str = "max_seq_len"
    memory: frozenset[str] = frozenset()
    contents: tuple[str, ...] = ()


def is_immutable(value: Any) -> bool:
    """Return whether an option is a value that stays as it is: a dtype of torch's, a mark."""
    torch = sys.modules.get("torch")
    from ..torch_ops import TorchScratch

    return isinstance(value, TorchScratch) or (torch is not None and isinstance(value, torch.dtype))


def note_use(arguments: Mapping[str, Any], notes: Notes) -> None:
    """Tell torch's allocator of a call's tensors where the call named a stream that is not the current one."""
    stream, launched = arguments.get("stream"), notes.launched[0] if notes.launched else None
    if stream is None or launched is None or launched.memory is None:
        return
    tensors = [
        value for value in (*arguments.values(), *(item.tensor for item in notes.new_tensors)) if is_plain(value)
    ]
    if tensors and stream_handle(stream) != launched.memory.stream_query()(launched.device):
        record_use(stream_handle(stream), launched.device, tensors)


def record_use(stream: int, device: int, tensors: Sequence[Any]) -> None:
    """Tell torch's allocator that ``stream`` uses tensors that the current stream may free."""
    import torch

    cuda: Any = torch.cuda  # its streams have no types
    used_on = cuda.ExternalStream(stream, device=device)
    for tensor in tensors:
        tensor.record_stream(used_on)
