"""What an MLA decode may be given: the rules of a paged decode, and those of its own cache, heads and dtypes."""

from __future__ import annotations

from ...errors import UsageError
from ...kernels.native.mla.select import MAX_HEADS, PAGE_SIZES
from ..decode_checks import (
    DecodeOptions,
    check_devices,
    check_dtype,
    check_dtypes_of_options,
    check_memory,
    check_options,
    check_queries,
    check_shapes,
    listed,
)
from .tensors import ROPE, MlaTensors

# Dtype of the cache -> what q may be, if a kernel takes it; the output may be any.
Q_DTYPES = {"bfloat16": ("bfloat16",), "float8_e4m3fn": ("bfloat16", "float8_e4m3fn")}
OUT_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def check_mla_decode(tensors: MlaTensors, options: DecodeOptions) -> None:
    """Hold a call against every rule.

    Raises:
        UsageError: the message names the argument, what came and what was expected.
    """
    check_queries(tensors, options)
    _check_cache(tensors)
    check_dtype("kv_cache", tensors.k, tuple(Q_DTYPES))
    check_dtype("q", tensors.q, Q_DTYPES[tensors.k.dtype], f" with a {tensors.k.dtype} cache")
    check_dtype("out", tensors.out, OUT_DTYPES)
    check_dtypes_of_options(tensors)
    check_shapes(tensors, tensors.out_shape)
    check_devices(tensors)
    check_memory(tensors)
    check_options(tensors, options)


def _check_cache(tensors: MlaTensors) -> None:
    pages, page_size, _, width = tensors.k.shape
    heads, columns = tensors.q.shape[-2:]
    if pages < 1:
        raise UsageError("kv_cache: no pages, expected at least one")
    if width <= ROPE:
        raise UsageError(f"kv_cache: rows of {width} columns, expected latent ones and {ROPE} rope ones")
    if columns != width:
        raise UsageError(f"q: {columns} columns a head, expected {width} as the rows of kv_cache have")
    if page_size not in PAGE_SIZES:
        raise UsageError(f"kv_cache: page size {page_size}, expected one of {listed(PAGE_SIZES)}")
    if not 1 <= heads <= MAX_HEADS:
        raise UsageError(f"q: {heads} heads, expected 1 to {MAX_HEADS}")
