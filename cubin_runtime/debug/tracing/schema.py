"""One call of an operator as a definition (what it is) and a workload (its sizes) of flashinfer-bench."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ...tensor import TensorView
from ...values import dataclass

# Its dtypes have no sign of their own for words: what is unsigned goes by the same bits.
_DTYPES = {"uint8": "int8", "uint16": "int16", "uint32": "int32", "uint64": "int64"}


@dataclass(frozen=True, slots=True)
class Constant:
    """An axis that is part of what the operator is, such as the head dimension; a plain str names a variable one."""

    name: str


Axis = str | Constant


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a call, with a name for each dimension."""

    name: str
    view: TensorView
    axes: tuple[Axis, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of a call; ``dtype`` is float32 or int32."""

    name: str
    value: float | int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of any operator.

    Attributes:
        op_type: the kind of operator, which is also a folder: ``gqa_paged``, ``mla_paged``.
        name: the operator and the layout of the queries, such as ``paged_decode_ragged``.
        inputs, outputs: in the order in which ``run`` of the reference takes and returns them.
        constants: values of constant axes that no tensor has as a dimension, such as the group.
        constraints: Python expressions over axes.
        reference: Python source that defines ``run``.
        tags: words to find it by.
    """

    op_type: str
    name: str
    inputs: tuple[Tensor | Scalar, ...]
    outputs: tuple[Tensor, ...]
    reference: str
    constants: Mapping[str, int] | None = None
    constraints: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    description: str = ""

    def definition(self) -> dict[str, Any]:
        """The definition; its name ends with a digest of the rest, so different ones differ in name.

        Raises:
            UsageError: two tensors of the call disagree about an axis.
        """
        constant, variable = self._axes()
        axes: dict[str, Any] = {name: {"type": "const", "value": value} for name, value in sorted(constant.items())}
        axes |= {name: {"type": "var"} for name in sorted(variable)}
        body = {
            "op_type": self.op_type,
            "tags": list(self.tags),
            "description": self.description or None,
            "axes": axes,
            "constraints": list(self.constraints),
            "inputs": {part.name: _spec(part) for part in self.inputs},
            "outputs": {part.name: _spec(part) for part in self.outputs},
            "reference": self.reference,
        }
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:8]
        sizes = "".join(f"_{name[:1]}{name.partition('_')[2][:1]}{value}" for name, value in sorted(constant.items()))
        return {"name": f"{self.name}{sizes}_{digest}", **body}

    def variable_axes(self) -> dict[str, int]:
        """The sizes of this call by their axes."""
        return self._axes()[1]

    def _axes(self) -> tuple[dict[str, int], dict[str, int]]:
        constant, variable = dict(self.constants or {}), dict[str, int]()
        for tensor in (part for part in (*self.inputs, *self.outputs) if isinstance(part, Tensor)):
            for axis, size in zip(tensor.axes, tensor.view.shape, strict=True):
                axes, name = (constant, axis.name) if isinstance(axis, Constant) else (variable, axis)
                if axes.setdefault(name, size) != size:
                    raise UsageError(f"{tensor.name}: {size} for axis {name}, which is {axes[name]} elsewhere")
        return constant, variable


def _spec(part: Tensor | Scalar) -> dict[str, Any]:
    if isinstance(part, Scalar):
        return {"shape": None, "dtype": part.dtype}
    shape = [axis.name if isinstance(axis, Constant) else axis for axis in part.axes]
    spec: dict[str, Any] = {"shape": shape, "dtype": _DTYPES.get(part.view.dtype, part.view.dtype)}
    return {**spec, "description": part.description} if part.description else spec
