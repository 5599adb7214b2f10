"""Selection of the context attention kernel for a problem on a device, and its grid: a pure choice from metadata."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, replace
from functools import lru_cache

from ....artifacts.tables.native_kernels import MEASURED, NativeKernel
from ....dtypes import BY_SHORT
from ....errors import UsageError
from ....launch.driver import DeviceFacts
from ....values import HashedOnce, dataclass
from ...explanation import Facts
from ..constants import CONSTANTS
from ..selection import Candidate, Selection, only_kernel

OPERATION = "context_attention"
CONVERSION, MERGE = "cache_conversion", "merge_parts"
# Columns of a query and a key -> those of a value.
VALUE_DIMS = {64: 64, 128: 128, 192: 128, 256: 256}
HEAD_DIMS = tuple(VALUE_DIMS)
# Those where batch_invariant gives the bits of decode; the bits of all kernels depend on no other token.
SEGMENT_HEAD_DIMS = (64, 128)
MAX_GROUP = 64
# Head packs whose work tiles are interleaved: as many as have keys and values of these bytes, which stay in L2.
_SECTION_BYTES = 32 << 20
# Or more, until each CTA has so many work tiles of them, because CTAs end the more unevenly the fewer they have; while
# so many CTAs walk the keys of one pack together, and read them from memory once.
_SECTION_WORK_TILES = 8
_CTAS_OF_A_PACK = 8
_WARPGROUP_ROWS = 64
# An e4m3 cache is converted before into at most so much memory.
_CONVERSION_BYTES = 512 << 20
# Microseconds that a CTA takes for a key tile, by head_dim, and for the launch with its first and last bytes: as one
# causal bf16 prompt of 2,048 to 16,384 tokens took on an H200 (benchmarks/results/prefill_single.json).
_TILE_US = {64: 1.53, 128: 1.74, 192: 2.03, 256: 1.65}
_FIXED_US = 10.0
# The same of kernels that convert e4m3 tiles, in the ratio to the others that chunks of 128 to 512 tokens over 16,384
# keys have; and of a conversion before, its launch and the bytes that it reads and writes in a microsecond
# (benchmarks/results/context_e4m3.json).
_E4M3_TILE_US = {64: 1.77, 128: 2.42, 192: 3.30, 256: 2.37}
_CONVERSION_US = 5.0
_CONVERSION_BYTES_US = 3.5e6
# Keys are split if row tiles of so many rows leave multiprocessors idle, into as many parts as the merge takes.
_SPLIT_ROWS = 128
MOST_SPLITS = CONSTANTS.merge_parts_max_splits
# Warps of a CTA that merges, the parts that each of them adds, and the CTAs that are on a multiprocessor at once.
_MERGE_WARPS = CONSTANTS.merge_parts_threads // 32
_MERGE_WARP_SPLITS = MOST_SPLITS // _MERGE_WARPS
_MERGE_CTAS = 3
# Merging the parts: its launch, each part of a row, and bytes in a microsecond.
_MERGE_US = 4.0
_MERGE_PART_US = 0.05
_MERGE_BYTES_US = 3.5e6
# Keys in front of the query tokens of requests far below the bound, for which the number of parts is chosen too.
_SHORTER_KEYS = 1024


@dataclass(frozen=True, slots=True)
class ContextShape:
    """The facts that decide the kernel and the grid: bounds, never the lengths themselves.

    ``dtype`` is that of queries and output, ``kv_dtype`` that of keys and values. ``tokens`` are the query tokens of
    all requests. ``convertible``: attention over a 16-bit copy of an e4m3 cache would be the same, and read all of it;
    ``copied`` are the requests of that copy and the tokens that each has room for, None: all and ``max_seq_len``.
    ``splittable``: the options allow that keys are split and the outputs merged. ``q_len`` is a bound on the query
    tokens of a request, 0: unknown.
    """

    dtype: str
    kv_dtype: str
    head_dim: int
    group: int
    kv_heads: int
    batch: int
    _: KW_ONLY
    tokens: int
    max_seq_len: int
    soft_cap: bool = False
    batch_invariant: bool = False
    convertible: bool = True
    copied: tuple[int, int] | None = None
    splittable: bool = True
    q_len: int = 0

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.group * self.kv_heads

    @property
    def value_dim(self) -> int:
        """Columns of a value."""
        return VALUE_DIMS[self.head_dim]

    @property
    def segments(self) -> bool:
        """Return whether decode must have the same bits."""
        return self.batch_invariant and self.head_dim in SEGMENT_HEAD_DIMS

    @property
    def packed(self) -> int:
        """Heads whose rows of a token are neighbours in a row tile: a power of two that divides the group."""
        return min(self.group & -self.group, _WARPGROUP_ROWS)

    @property
    def head_packs(self) -> int:
        """Packs of heads, each of one KV head."""
        return self.heads // self.packed

    @property
    def copy(self) -> tuple[int, int]:
        """``copied``, with its default."""
        return self.copied or (self.batch, self.max_seq_len)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the 16-bit copy of an e4m3 cache; 0: there can be none, or it would be too large."""
        if self.kv_dtype == self.dtype or not self.convertible:
            return 0
        columns = self.head_dim + self.value_dim
        size = math.prod(self.copy) * self.kv_heads * columns * BY_SHORT[self.dtype].nbytes
        return size if size <= _CONVERSION_BYTES else 0

    def row_tiles(self, rows: int) -> int:
        """Tiles of so many rows that a head pack has in all requests, at most: each fills all of its tiles but one."""
        return self.tokens * self.packed // rows + self.batch

    def section_packs(self, multiprocessors: int, rows: int) -> int:
        """Packs whose work tiles, of ``rows`` rows, are interleaved; sections are about equal."""
        token_bytes = BY_SHORT[self.kv_dtype].nbytes * (self.head_dim + self.value_dim)
        pack_bytes = max(1, self.max_seq_len * token_bytes * self.kv_heads // self.head_packs)
        row_tiles = max(1, self.tokens * self.packed // (rows * self.batch))
        even = min(math.ceil(_SECTION_WORK_TILES * multiprocessors / row_tiles), multiprocessors // _CTAS_OF_A_PACK)
        sections = math.ceil(self.head_packs / max(1, even, _SECTION_BYTES // pack_bytes))
        return math.ceil(self.head_packs / sections)


def most_copy_bytes(requests: int, request_bytes: int) -> int:
    """Bytes of the largest 16-bit copy that is made of an e4m3 cache for up to ``requests`` requests.

    ``request_bytes``: of a request's part of the copy.
    """
    return min(requests, _CONVERSION_BYTES // request_bytes) * request_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSelection(Selection):
    """The kernel chosen and how it is launched; ``row_tiles`` are those of all requests, at most.

    ``splits`` are the parts of each work tile's keys, 0: they are not split.
    """

    packed: int
    section_packs: int

    def grid(self, shape: object) -> tuple[int, int, int]:
        """CTAs, for each part of the keys."""
        return self.ctas, max(1, self.splits), 1

    def facts(self, shape: ContextShape) -> Facts:
        """Row tiles, the heads in one, and the order of the work tiles."""
        rows = int(self.kernel.traits["rows"])
        tiles = f"at most {self.row_tiles} of {rows} rows: {rows // self.packed} tokens x {self.packed} heads"
        order = f"longest request first; {self.section_packs} of {shape.head_packs} head packs interleaved"
        key_tiles = self.key_tiles(shape)
        work = f"about {key_tiles:.0f} key tiles for each CTA, if causal and of equal lengths"
        parts = f"{_FIXED_US} + {key_tiles:.1f} x {self.tile_us(shape)}"
        predicted = f"{self.predicted_us(shape):.1f} us on an H200: {parts}"
        if self.splits:
            tiles += f"; keys in {self.splits} parts"
        return ("row tiles", tiles), ("order", order), ("work", work), ("predicted", predicted)

    def key_tiles(self, shape: ContextShape) -> float:
        """The key tiles that a CTA computes, of causal requests that have equally many query tokens and the most keys.

        They are as many for all CTAs, but no fewer than the longest work tile, or a part of it, has.
        """
        tokens, tile = int(self.kernel.traits["rows"]) // self.packed, int(self.kernel.traits["tile_tokens"])
        q_len = _query_tokens(shape)
        in_front = shape.max_seq_len - q_len
        longest = -(-max(0, shape.max_seq_len) // tile)  # of the last row tile
        if self.splits:
            return -(-longest // self.splits)
        # The others end `tokens` after the one before; those that end before the first key have none.
        skipped = max(0, -in_front // tokens)
        others = max(0, -(-q_len // tokens) - 1 - skipped)
        total = longest + floor_sum(others, tile, tokens, in_front + (skipped + 1) * tokens + tile - 1)
        return max(total * shape.batch * shape.head_packs / self.ctas, longest)

    def predicted_us(self, shape: ContextShape) -> float:
        """Microseconds of such a batch, without a merge."""
        return _FIXED_US + self.tile_us(shape) * self.key_tiles(shape)

    def tile_us(self, shape: ContextShape) -> float:
        """Microseconds that a CTA takes for a key tile; the kernel may read a 16-bit copy of the cache."""
        traits = self.kernel.traits
        return (_TILE_US if traits["kv_dtype"] == traits["dtype"] else _E4M3_TILE_US)[shape.head_dim]


def floor_sum(count: int, divisor: int, step: int, first: int) -> int:
    """The sum of (``first`` + i ``step``) // ``divisor`` over i below ``count``, for numbers from 0 on; as Euclid finds
    a common divisor."""
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // divisor) + count * (first // divisor)
        step, first = step % divisor, first % divisor
        beyond = count * step + first
        if beyond < divisor:
            return total
        count, first = divmod(beyond, divisor)
        divisor, step = step, divisor


def _query_tokens(shape: ContextShape) -> int:
    """The query tokens of each request, if all have as many."""
    return -(-shape.tokens // shape.batch)


def merge_us(shape: ContextShape, splits: int) -> float:
    """Microseconds of the merge of so many parts, which are written and read in fp32."""
    part_bytes = 2 * 4 * shape.tokens * shape.heads * shape.value_dim
    return _MERGE_US + splits * (_MERGE_PART_US + part_bytes / _MERGE_BYTES_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsMerge(Selection):
    """The kernel that merges ``splits`` parts of each row, which ``warps`` share; there is ``room`` for the rows of a
    wave of CTAs."""

    warps: int
    room: int

    def facts(self, shape: ContextShape) -> Facts:
        """The parts, and the time."""
        return ("merged", f"{self.splits} parts of each row"), ("predicted", f"{merge_us(shape, self.splits):.1f} us")


def select_context_attention(
    kernels: Iterable[NativeKernel], shape: ContextShape, device: DeviceFacts, *, splits: int = 0
) -> ContextSelection:
    """The kernel of the dtype and head dimension, on one persistent CTA per multiprocessor.

    Its keys are split into so many parts; 0: not.

    Raises:
        UsageError: no kernel fits; the message says what those of the release are for.
    """
    candidates = _candidates_of(kernels, shape, device, split_keys=splits > 0)
    fitting = [candidate.kernel for candidate in candidates if not candidate.unfit]
    if not fitting:
        raise UsageError(
            f"no context attention kernel for {shape.dtype} queries over {shape.kv_dtype} keys, "
            f"head_dim {shape.head_dim} on compute capability {device.capability[0]}.{device.capability[1]}: "
            + ("; ".join(f"{c.kernel.name}: {c.unfit}" for c in candidates) or "the release has none")
        )
    best = fitting[0]
    rows = int(best.traits["rows"])
    row_tiles = shape.row_tiles(rows)
    work_tiles = row_tiles * shape.head_packs
    status = "" if best.status == MEASURED else f", {best.status}"
    bits = f"; segments of {CONSTANTS.segment_tokens} keys, as in decode" if shape.segments else ""
    return ContextSelection(
        kernel=best,
        ctas=min(device.multiprocessors // max(1, splits), work_tiles),
        row_tiles=row_tiles,
        splits=splits,
        explain=lambda: (f"built for {best.architecture}{status}; at most {work_tiles} work tiles{bits}", candidates),
        packed=shape.packed,
        section_packs=shape.section_packs(device.multiprocessors, rows),
    )


class ConversionSelection(Selection):
    """The kernel that converts a cache, and its grid: a CTA for some tokens of a KV head, keys or values."""

    def grid(self, shape: ContextShape) -> tuple[int, int, int]:
        """Heads of keys and of values, tokens, and requests."""
        return _conversion_grid(self.kernel, shape)

    def facts(self, shape: ContextShape) -> Facts:
        """The size of the copy and the time."""
        requests, tokens = shape.copy
        words = f"at most {requests} x {tokens} tokens of {shape.kv_heads} KV heads to {shape.dtype}"
        return ("converted", words), ("predicted", f"{self.predicted_us(shape):.1f} us on an H200")

    def predicted_us(self, shape: ContextShape) -> float:
        """Microseconds of a cache that is as full as it may be; half as many bytes are read as written."""
        return _CONVERSION_US + 1.5 * shape.copy_bytes / _CONVERSION_BYTES_US


def _conversion_grid(kernel: NativeKernel, shape: ContextShape) -> tuple[int, int, int]:
    requests, tokens = shape.copy
    return 2 * shape.kv_heads, -(-tokens // int(kernel.traits["cta_tokens"])), requests


# The attention, behind a conversion of the cache, or in front of the merge of its parts.
ContextSelections = (
    tuple[ContextSelection] | tuple[ConversionSelection, ContextSelection] | tuple[ContextSelection, PartsMerge]
)


def select_context_launches(
    kernels: Iterable[NativeKernel], shape: ContextShape, device: DeviceFacts
) -> ContextSelections:
    """The kernel of context attention, behind that which converts an e4m3 cache where both take less time than one, or
    in front of the merge of its parts where few row tiles see many keys.

    A kernel over e4m3 converts a key tile for each row tile that sees it, a conversion before does it once.

    Raises:
        UsageError: as ``select_context_attention``.
    """
    direct = select_context_attention(kernels, shape, device)
    if split := _split(kernels, shape, device, int(direct.kernel.traits["tile_tokens"])):
        return split
    if not shape.copy_bytes:
        return (direct,)
    kernel, candidates = only_kernel(kernels, CONVERSION, {"dtype": shape.dtype}, device)
    attention = select_context_attention(kernels, replace(shape, kv_dtype=shape.dtype), device)
    direct_us, over_copy_us = direct.predicted_us(shape), attention.predicted_us(shape)
    conversion = ConversionSelection(
        kernel=kernel,
        ctas=math.prod(_conversion_grid(kernel, shape)),
        row_tiles=1,
        splits=0,
        explain=lambda: (
            f"attention over 16 bits is predicted to take {over_copy_us:.1f} us, over e4m3 {direct_us:.1f} us",
            candidates,
        ),
    )
    if direct_us <= conversion.predicted_us(shape) + over_copy_us:
        return (direct,)
    return conversion, attention


def _split(
    kernels: Iterable[NativeKernel], shape: ContextShape, device: DeviceFacts, tile_tokens: int
) -> tuple[ContextSelection, PartsMerge] | None:
    """The launches with split keys, if they lose less than one launch at any length; None: one launch is better, or the
    release has no kernels for it."""
    splits = _splits(shape, device, tile_tokens)
    if not splits or all(candidate.unfit for candidate in _candidates_of(kernels, shape, device, split_keys=True)):
        return None
    attention = select_context_attention(kernels, shape, device, splits=splits)
    kernel, candidates = only_kernel(kernels, MERGE, {"dtype": shape.dtype}, device)
    rows = shape.tokens * shape.heads
    warps = _merge_warps(rows, splits, device)
    return attention, PartsMerge(
        kernel=kernel,
        ctas=-(-rows * warps // _MERGE_WARPS),
        row_tiles=1,
        splits=splits,
        explain=lambda: (f"{warps} warps share a row", candidates),
        warps=warps,
        room=device.multiprocessors * _SPLIT_ROWS,
    )


def _merge_warps(rows: int, splits: int, device: DeviceFacts) -> int:
    """As many warps for each row as there is room for at once, and as have a part: all loads are in flight together."""
    wave = device.multiprocessors * _MERGE_CTAS * _MERGE_WARPS
    usable = [n for n in (1, 2, 4, 8) if n <= splits <= n * _MERGE_WARP_SPLITS]
    return max([n for n in usable if rows * n <= wave], default=usable[0])


def _most_splits(shape: ContextShape, device: DeviceFacts) -> int:
    """The most parts of the keys that a wave of CTAs computes, with as many rows; below 2: they are not to be split."""
    if not shape.splittable or shape.batch_invariant:
        return 0
    row_tiles = shape.row_tiles(_SPLIT_ROWS)
    if shape.q_len:
        of_requests = shape.batch * -(-shape.q_len * shape.packed // _SPLIT_ROWS)
        # Of a padded batch, tokens may be more than requests have.
        row_tiles = min(row_tiles, max(of_requests, -(-shape.tokens * shape.packed // _SPLIT_ROWS)))
    return min(device.multiprocessors // (row_tiles * shape.head_packs), MOST_SPLITS)


def _splits(shape: ContextShape, device: DeviceFacts, tile_tokens: int) -> int:
    """The parts of the keys that lose least at any length; 0: not to split them.

    A number of parts loses what its predicted time exceeds that of the best for requests of that length: those of the
    bound, and short ones, as bounds are often far above the lengths. The dtype of keys and the rows of its kernel do
    not count, so that a 16-bit cache of the same numbers has the same bits.
    """
    most = _most_splits(shape, device)
    if most < 2:
        return 0
    choices = (0, *[count for count in (2, 4, 8, 16, 32) if count < most], most)
    lengths = {shape.max_seq_len, min(shape.max_seq_len, _query_tokens(shape) + _SHORTER_KEYS)}

    def time_of(splits: int, keys: int) -> float:
        tiles = -(-keys // tile_tokens)
        of_part = -(-tiles // max(1, splits))
        return _FIXED_US + _TILE_US[shape.head_dim] * of_part + (merge_us(shape, splits) if splits else 0.0)

    times = [[time_of(splits, keys) for keys in lengths] for splits in choices]
    least = [min(of_length) for of_length in zip(*times, strict=True)]
    losses = [max([time / best for time, best in zip(row, least, strict=True)]) for row in times]
    return choices[losses.index(min(losses))]


def _candidates_of(
    kernels: Iterable[NativeKernel], shape: ContextShape, device: DeviceFacts, *, split_keys: bool
) -> tuple[Candidate, ...]:
    form = (shape.dtype, shape.kv_dtype, shape.head_dim, shape.soft_cap, shape.segments)
    return _candidates(HashedOnce.of(kernels), device.sm_number, *form, split_keys)


@lru_cache(maxsize=256)  # calls of any size have the same
def _candidates(
    kernels: HashedOnce[NativeKernel],
    number: int,
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    soft_cap: bool,
    segments: bool,
    split_keys: bool,
) -> tuple[Candidate, ...]:
    def unfit(kernel: NativeKernel) -> str:
        if not kernel.architecture.runs_on(number):
            return f"built for {kernel.architecture}"
        options = (("dtype", dtype), ("kv_dtype", kv_dtype), ("head_dim", head_dim), ("soft_cap", soft_cap))
        for name, value in options:
            if kernel.traits[name] != value:
                return f"{name} is {kernel.traits[name]}"
        if kernel.traits["segments"] != segments:
            return "it has no segments" if segments else "segments, which only batch_invariant needs"
        if kernel.traits.get("split_keys", False) != split_keys:
            return "it does not split keys" if split_keys else "split keys, which only few row tiles need"
        return ""

    return tuple(Candidate(kernel=k, unfit=unfit(k)) for k in kernels if k.operation == OPERATION)
