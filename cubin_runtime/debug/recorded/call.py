"""A recorded call as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ...tensor import TensorView
from ...values import dataclass

Option = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """One tensor: its view on the device, and its elements, contiguous.

    ``paged``: only the pages ``RecordedCall.page_ids`` of its first dimension are among ``data``. ``output``: the call
    wrote it; ``data`` is then what it wrote, empty if the call failed.
    """

    view: TensorView
    data: bytes
    paged: bool = False
    output: bool = False


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of an operator.

    Attributes:
        operator: ``paged_decode``, ``mla_decode``, or ``trtllm_gen.`` and the kind of call.
        tensors: by the operator's names for them.
        options: what the call was told besides tensors.
        page_ids: the pages that paged tensors have.
        kernels: what was launched: name, symbol, sha256, grid and so on, as text.
        origin: pin, device and versions, as text.
        error: the message of the call's error, or "".
    """

    operator: str
    tensors: Mapping[str, RecordedTensor]
    options: Mapping[str, Option]
    page_ids: tuple[int, ...] = ()
    kernels: tuple[Mapping[str, str], ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(len(tensor.data) for tensor in self.tensors.values())
