"""A KV append as a traced call."""

from __future__ import annotations

from ...attention.operator import Call
from ...dtypes import DTYPES
from .decode import scale_axes
from .references import run_of
from .schema import Axis, Constant, Scalar, Tensor, TracedCall

_SCALES = ("k_scale", "v_scale")


def traced_append(call: Call) -> TracedCall:
    """A call of ``append_kv``; the caches, which it writes in place, are inputs and outputs of the definition."""
    tensors, options = call.tensors, call.options
    k, k_cache = tensors["k"], tensors["k_cache"]
    tokens: tuple[Axis, ...] = ("tokens",) if len(k.shape) == 3 else ("batch", "new_tokens")
    page: tuple[Axis, ...] = ("pages", Constant("page_size"), Constant("kv_heads"))
    dims: dict[str, Axis] = {"k": Constant("head_dim"), "v": Constant("value_dim")}
    optional: dict[str, tuple[Axis, ...]] = {
        "seq_lens": ("batch",),
        "q_cu_seq_lens": ("batch_plus_1",),
        "positions": ("tokens",),
        "batch_indices": ("tokens",),
        "page_indptr": ("batch_plus_1",),
    }
    table: tuple[Axis, ...] = ("batch", "columns") if tensors.get("page_indptr") is None else ("page_ids",)
    caches = {name: tensors[f"{name}_cache"] for name in dims}
    inputs: list[Tensor | Scalar] = [
        Tensor("k", k, (*tokens, Constant("kv_heads"), dims["k"])),
        Tensor("v", tensors["v"], (*tokens, Constant("kv_heads"), dims["v"])),
        *(Tensor(f"{name}_cache", view, (*page, dims[name]), "as strides had it") for name, view in caches.items()),
        Tensor("page_table", tensors["page_table"], table),
    ]
    present = {name: view for name in (*optional, *_SCALES) if (view := tensors.get(name)) is not None}
    inputs += [Tensor(name, present[name], axes) for name, axes in optional.items() if name in present]
    inputs += [Tensor(name, present[name], scale_axes(present[name])) for name in _SCALES if name in present]
    numbers = {name: getattr(options, name) for name in _SCALES}
    inputs += [Scalar(name, number) for name, number in numbers.items() if number is not None]
    axes = {axis for part in inputs if isinstance(part, Tensor) for axis in part.axes}
    form = "positions" if "positions" in present else "ragged" if "q_cu_seq_lens" in present else "dense"
    return TracedCall(
        op_type="append_kv",
        name=f"append_kv_{form}_{DTYPES[k.dtype].short}_{DTYPES[k_cache.dtype].short}",
        inputs=tuple(inputs),
        outputs=tuple(Tensor(f"{name}_cache_out", view, (*page, dims[name])) for name, view in caches.items()),
        reference=run_of("append", inputs, {"lengths_include_new": repr(options.lengths_include_new)}),
        constraints=("batch_plus_1 == batch + 1",) if {"batch", "batch_plus_1"} <= axes else (),
        tags=("stage:append", f"form:{form}"),
        description="New keys and values into the pages of a cache, which is written in place",
    )
