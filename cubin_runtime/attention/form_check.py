"""The check that a step's torch tensors are of known forms, as a function made for those forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .operator import Given, TensorArg


def form_check(declared: Sequence[TensorArg], forms: Sequence[Any]) -> Callable[[Given], tuple[int, ...] | None]:
    """A function of a call's arguments by name that gives the tensors' addresses.

    It gives None where a tensor differs from its form (of ``Operator.forms``) in type, dtype, shape, strides or device,
    or has an address that is null or not aligned: whoever calls it then finds out which, and says so. Dtype, shape and
    strides are compared at every call, since all of them can change while object and address stay.
    """
    conditions, there = [], []
    scope: dict[str, Any] = {}
    for number, (arg, form) in enumerate(zip(declared, forms, strict=True)):
        if form is None:
            conditions.append(f"{arg.name} is not None")
            continue
        there.append((number, arg))
        kind, dtype, shape, stride, device = form
        scope |= {f"type{number}": kind, f"dtype{number}": dtype, f"shape{number}": shape, f"stride{number}": stride}
        conditions.append(
            f"type({arg.name}) is not type{number} or {arg.name}.dtype != dtype{number} or {arg.name}.shape != "
            f"shape{number} or {arg.name}.stride() != stride{number} or {arg.name}.get_device() != {device}"
        )
    reads = "".join(f"    a{number} = {arg.name}.data_ptr()\n" for number, arg in there)
    aligned = []
    for alignment in sorted({arg.alignment for _, arg in there}):
        together = " | ".join(f"a{number}" for number, arg in there if arg.alignment == alignment)
        aligned.append(f"({together}) & {alignment - 1}")
    present = " and ".join(f"a{number}" for number, _ in there)
    names = {number for number, _ in there}
    result = ", ".join(f"a{number}" if number in names else "0" for number in range(len(declared)))
    source = (
        f"def bind({', '.join(scope)}):\n"
        "  def addresses(given):\n"
        f"{''.join(f'    {arg.name} = given[{arg.name!r}]{chr(10)}' for arg in declared)}"
        f"    if {' or '.join(conditions)}:\n      return None\n"
        f"{reads}"
        f"    if {' or '.join(aligned)} or not ({present}):\n      return None\n"
        f"    return {result}\n"
        "  return addresses\n"
    )
    found: dict[str, Any] = {}
    exec(compile(source, "<form check>", "exec"), found)
    made: Callable[[Given], tuple[int, ...] | None] = found["bind"](**scope)
    return made
