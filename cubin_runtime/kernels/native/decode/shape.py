"""The shape of a decode that kernel selection depends on: bounds, and what follows from them alone."""

from __future__ import annotations

from dataclasses import KW_ONLY, fields
from operator import attrgetter

from ....values import dataclass
from ..constants import CONSTANTS

MAX_QUERIES = 64
# batch_invariant makes at most this many splits of a row tile over all KV heads together: enough for a whole GPU.
_INVARIANT_SPLITS = 128


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The facts that decide the kernel and the grid: bounds, never the lengths themselves.

    ``dtype`` is that of the KV cache and ``q_dtype`` that of the queries (``bf16``, ``fp16``, ``e4m3``; empty: as the
    cache's), ``group`` the query heads per KV head,
    ``q_len`` the query tokens of each request or, where ``ragged``, their bound; then ``tokens`` are those of all
    requests. ``window_left`` is -1 without a window.
    """

    dtype: str
    head_dim: int
    group: int
    kv_heads: int
    batch: int
    _: KW_ONLY
    q_dtype: str = ""
    q_len: int = 1
    tokens: int = 0
    ragged: bool = False
    max_seq_len: int
    window_left: int = -1
    batch_invariant: bool = False

    @property
    def form(self) -> tuple[object, ...]:
        """All fields except the number of requests and their total number of tokens."""
        return _FORM(self)

    @classmethod
    def of_form(cls, form: tuple[object, ...]) -> DecodeShape:
        """One request of that form."""
        return cls(batch=1, **dict(zip(_FORM_NAMES, form, strict=True)))  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """Query rows of one request and KV head, or their bound: tokens times group."""
        return self.q_len * self.group

    def kv_tokens(self, tile_tokens: int) -> int:
        """Keys that a request reads at most: a window ends with the last query and may begin and end within tiles."""
        if self.window_left < 0:
            return self.max_seq_len
        return min(self.max_seq_len, self.window_left + self.q_len + tile_tokens)

    def tiles(self, tile_tokens: int) -> int:
        """Tiles of a request and KV head at most; one without keys has an empty one."""
        return max(1, -(-self.kv_tokens(tile_tokens) // tile_tokens))

    @property
    def segments(self) -> int:
        """Segments of a request at most, where prefill and decode give the same bits."""
        segment = CONSTANTS.segment_tokens
        return max(1, -(-min(self.max_seq_len, self.kv_tokens(segment)) // segment))

    def splits(self, tile_tokens: int) -> int:
        """Splits of an output tile under ``batch_invariant``, at most; 0: they follow from the grid."""
        if not self.batch_invariant:
            return 0
        return min(-(-_INVARIANT_SPLITS // self.kv_heads), split_count(self.tiles(tile_tokens), tile_tokens))


_FORM_NAMES = tuple(field.name for field in fields(DecodeShape) if field.name not in ("batch", "tokens"))
_FORM = attrgetter(*_FORM_NAMES)


def split_count(tiles: int, tile_tokens: int) -> int:
    """Splits of an output tile of ``tiles`` KV tiles under ``batch_invariant``, without their bound, as in the kernels.

    It never decreases with the tiles: a bound on the tiles bounds the splits, and changes those of no request.
    """
    tokens = tiles * tile_tokens
    short = min(CONSTANTS.decode_short_splits, -(-tokens // CONSTANTS.decode_short_split_tokens))
    return max(-(-tokens // CONSTANTS.decode_split_tokens), short)
