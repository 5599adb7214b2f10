"""The TMA descriptors of a launch, as specs that the driver encodes later."""

from __future__ import annotations

from ...artifacts.tables.metadata import KernelMeta
from ...launch.tensormap import TensorMapSpec
from ...values import dataclass
from .arithmetic import INT32_MAX
from .errors import PlanRefused
from .problem import Problem
from .traits import ELEMENTS, Element, KernelType, QkvLayout

# Bytes of a box row: one line of shared memory.
LINE_BYTES = 128
LONGEST_BOX_ROW = 128
SCALE_BLOCK = 16
UNPACKED_MAP_TYPE = "16u4_align16b"


@dataclass(frozen=True, slots=True)
class TensorMaps:
    """The specs of a launch's descriptors, None for those that are not built, and two numbers derived with them.

    ``tokens_per_cta`` is the number of query tokens per CTA; ``reshape_factor`` KV rows are folded into one row.
    """

    query: TensorMapSpec
    key: TensorMapSpec
    window_pool: TensorMapSpec | None
    value: TensorMapSpec
    out: TensorMapSpec
    key_scales: TensorMapSpec | None
    value_scales: TensorMapSpec | None
    tokens_per_cta: int
    reshape_factor: int


def describe_tensors(problem: Problem, meta: KernelMeta) -> TensorMaps:
    """The descriptors that ``meta`` takes for a problem."""
    query, tokens = _query(problem, meta)
    kv = _Kv.of(problem, meta)
    at = problem.bindings
    scaled = problem.dtype_k == problem.dtype_v == "e2m1"
    if problem.sparse:
        key = kv.token_spec(problem, at.key)
    else:
        key = kv.spec(problem, at.key, problem.strides.key, of_value=False)
    return TensorMaps(
        query=query,
        key=key,
        window_pool=kv.token_spec(problem, at.window_pool) if at.window_pool else None,
        value=kv.spec(problem, at.value, problem.strides.value, of_value=True),
        out=_out(problem, meta),
        key_scales=kv.scales_spec(problem, at.key_scales) if scaled else None,
        value_scales=kv.scales_spec(problem, at.value_scales) if scaled else None,
        tokens_per_cta=tokens,
        reshape_factor=kv.reshape_factor,
    )


def _query(problem: Problem, meta: KernelMeta) -> tuple[TensorMapSpec, int]:
    """Dimensions: head_dim, heads of a group within one tile, remaining heads, tokens. Also the tokens per CTA."""
    dtype = ELEMENTS[problem.dtype_q]
    grouped = min(meta.tile_q, problem.group) if meta.groups_heads_q else 1
    if problem.heads_q % grouped:
        raise PlanRefused(
            f"heads: {problem.heads_q} query heads do not divide into tiles of {grouped} heads ({meta.symbol})"
        )
    token_stride, head_stride = problem.strides.query
    head_stride = head_stride or problem.head_dim_qk
    token_stride = token_stride or problem.heads_q * problem.head_dim_qk
    row = _row(dtype, problem.head_dim_qk)
    if not meta.groups_heads_q:
        tokens, box = meta.tile_q, (row, 1, 1, meta.tile_q)
    elif meta.groups_tokens_heads_q:
        tokens = meta.tile_q // grouped  # whole tokens: rows that are left over stay empty
        box = (row, grouped, 1, tokens)
    else:
        tokens, box = 1, (row, meta.tile_q, 1, 1)
    spec = _tensor_map(
        dtype,
        problem.bindings.query,
        (problem.head_dim_qk, grouped, problem.heads_q // grouped, problem.tokens_q),
        (head_stride, grouped * head_stride, token_stride),
        box,
    )
    return spec, tokens


def _out(problem: Problem, meta: KernelMeta) -> TensorMapSpec:
    """Dimensions: head_dim, tokens, KV heads, heads of a group, 1. The element type is that of the query."""
    dtype = ELEMENTS[problem.dtype_q]
    width = problem.head_dim_v
    return _tensor_map(
        dtype,
        problem.bindings.out,
        (width, problem.tokens_q, problem.heads_kv, problem.group, 1),
        (problem.heads_q * width, width, problem.heads_kv * width, 0),
        (_row(dtype, problem.head_dim_qk), meta.tile_q, 1, 1, 1),
    )


@dataclass(frozen=True, slots=True)
class _Kv:
    """The common part of the descriptors of K, V and their scales.

    ``packing`` is 2 for FP4 that stays packed, whose elements are bytes; ``unpacked`` FP4 is widened by the TMA copy.
    ``row`` is the number of elements of a box row, ``keys_per_tile`` the number of KV tokens of a box.
    """

    largest_head_dim: int
    packing: int
    unpacked: bool
    swizzled: bool
    row: int
    keys_per_tile: int
    reshape_factor: int

    @classmethod
    def of(cls, problem: Problem, meta: KernelMeta) -> _Kv:
        largest = max(problem.head_dim_qk, problem.head_dim_v)
        dtype = ELEMENTS[problem.dtype_k]
        fp4 = problem.dtype_k == problem.dtype_v == "e2m1"
        unpacked = (
            fp4 and problem.dtype_q == "e4m3" and largest >= LONGEST_BOX_ROW and meta.kernel_type == KernelType.SWAPS_AB
        )
        packing = 2 if fp4 and not unpacked else 1
        swizzled = unpacked or problem.dtype_k == problem.dtype_q
        paged = problem.layout == QkvLayout.PAGED
        keys = min(problem.page, meta.tile_kv) if paged else meta.tile_kv
        row = min(LINE_BYTES * 8 // dtype.bits, largest, LONGEST_BOX_ROW) // packing
        factor = 1
        if (
            paged
            and problem.head_dim_qk == problem.head_dim_v
            and not swizzled
            and problem.strides.key[0] == problem.strides.value[0] == largest
        ):
            line = max(1, largest * dtype.bits // 8)
            factor = max(1, min(LINE_BYTES // largest, LINE_BYTES // line, keys))
        return cls(largest, packing, unpacked, swizzled, row, keys, factor)

    def spec(self, problem: Problem, address: int, strides: tuple[int, int, int], *, of_value: bool) -> TensorMapSpec:
        """Dimensions: head_dim, tokens of a page (or all tokens), KV heads, pages."""
        dtype = ELEMENTS[problem.dtype_v if of_value else problem.dtype_k]
        token_stride, head_stride, page_stride = strides
        if problem.layout == QkvLayout.PAGED:
            head_dim, keys, pages = self.largest_head_dim, problem.page, problem.pages
        else:
            head_dim = problem.head_dim_v if of_value else problem.head_dim_qk
            keys, pages, page_stride = problem.tokens_kv, 1, max(0, page_stride)
        factor, packing = self.reshape_factor, 2 if problem.dtype_k == "e2m1" else 1
        row, tokens = self.row * factor, self.keys_per_tile // factor
        if of_value:
            if problem.dtype_v != problem.dtype_k and not self.unpacked:
                row = row * ELEMENTS[problem.dtype_k].bits // dtype.bits
            tokens = 1 if problem.sparse else tokens
        return _tensor_map(
            dtype,
            address,
            (head_dim // self.packing * factor, keys // factor, problem.heads_kv, pages),
            (token_stride // packing * factor, head_stride // packing, page_stride // packing),
            (row, tokens, 1, 1),
            swizzled=self.swizzled,
            unpacked=self.unpacked,
        )

    def token_spec(self, problem: Problem, address: int) -> TensorMapSpec:
        """Sparse keys: an unbounded list of single tokens."""
        dtype = ELEMENTS[problem.dtype_k]
        width = problem.head_dim_qk
        box = (self.row, 1)
        return _tensor_map(dtype, address, (width, INT32_MAX), (width,), box, swizzled=self.swizzled)

    def scales_spec(self, problem: Problem, address: int) -> TensorMapSpec:
        """Block scales: one byte per 16 numbers, several tokens folded into one row."""
        blocks = self.largest_head_dim // SCALE_BLOCK
        factor = max(1, min(LINE_BYTES // max(1, blocks), self.keys_per_tile))
        line = blocks * factor
        head_stride, page_stride = problem.strides.key_scales
        return _tensor_map(
            ELEMENTS["e4m3"],
            address,
            (line, problem.page // factor, problem.heads_kv, problem.pages),
            (line, head_stride, page_stride),
            (line, self.keys_per_tile // factor, 1, 1),
            swizzled=False,
        )


def _row(dtype: Element, head_dim: int) -> int:
    return min(LINE_BYTES * 8 // dtype.bits, head_dim)


_ONES = {rank: (1,) * rank for rank in (2, 4, 5)}


def _tensor_map(
    dtype: Element,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzled: bool = True,
    unpacked: bool = False,
) -> TensorMapSpec:
    """A spec from strides in elements; the swizzle follows from the number of bytes in a box row."""
    size = dtype.nbytes
    swizzle = _swizzle(box[0] * size) if swizzled else "none"
    return TensorMapSpec(
        UNPACKED_MAP_TYPE if unpacked else dtype.map_type,
        address,
        dims,
        tuple(stride * size for stride in strides) if size != 1 else strides,
        box,
        _ONES[len(dims)],
        "none",
        swizzle,
        "128B",
        "zero",
    )


def _swizzle(row_bytes: int) -> str:
    for span in (128, 64, 32):
        if row_bytes % span == 0:
            return f"{span}B"
    return "none"
