"""A KV append as a launch plan: grid, workspace, and every parameter that does not come with a run."""

from __future__ import annotations

from ....launch.plan import LaunchAttributes
from ....values import dataclass, replaced
from ..constants import CONSTANTS
from ..launches import STATUS, KernelFile, NativeLaunch, native_plan
from ..problem import kv_scale_strides
from .select import AppendSelection

UNIT_BYTES = 16  # of a cache's row
NUMBERS = ("k_scale", "v_scale")  # that come with each run
_PLACES_COST = 0.3  # of finding where a chunk's tokens go, in times of a batch of units


@dataclass(frozen=True, slots=True)
class AppendStrides:
    """Bytes: between tokens and heads of the source, and between pages, tokens and heads of the cache."""

    source_token: int
    source_head: int
    page: int
    token: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendProblem:
    """A KV append. ``k_units`` and ``v_units`` are the 16-byte units of a row in the caches.

    ``new_tokens`` are those of each request where all have as many; ``columns`` the page ids of a request or, in a
    ragged table, of all. The scales' strides are elements between requests and between KV heads.
    """

    batch: int
    tokens: int
    new_tokens: int
    lengths_include_new: bool
    kv_heads: int
    page_size: int
    num_pages: int
    columns: int
    table_stride: int
    k_units: int
    v_units: int
    k_strides: AppendStrides
    v_strides: AppendStrides
    k_scale: float
    v_scale: float
    k_scale_strides: tuple[int, int] = (0, 0)
    v_scale_strides: tuple[int, int] = (0, 0)
    programmatic_serialization: bool = False

    @property
    def token_units(self) -> int:
        """Units of a token's keys and values."""
        return self.kv_heads * (self.k_units + self.v_units)

    def values(self) -> dict[str, object]:
        """The fields of the struct that are not pointers."""
        strides: dict[str, object] = {}
        for source, cache, of in (("key", "k", self.k_strides), ("value", "v", self.v_strides)):
            strides |= {
                f"{source}_token_stride": of.source_token,
                f"{source}_head_stride": of.source_head,
                f"{cache}_page_stride": of.page,
                f"{cache}_token_stride": of.token,
                f"{cache}_head_stride": of.head,
            }
        return {
            **strides,
            "table_stride": self.table_stride,
            "batch": self.batch,
            "tokens": self.tokens,
            "new_tokens": self.new_tokens,
            "lengths_include_new": int(self.lengths_include_new),
            "kv_heads": self.kv_heads,
            "page_size": self.page_size,
            "num_pages": self.num_pages,
            "columns": self.columns,
            "k_units": self.k_units,
            "v_units": self.v_units,
            "token_units": self.token_units,
            "k_reciprocal": reciprocal(self.k_units),
            "v_reciprocal": reciprocal(self.v_units),
            "token_reciprocal": reciprocal(self.token_units),
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }


def reciprocal(divisor: int) -> int:
    """The factor with which the kernel divides numbers below 2^32 / ``divisor``; that is at least 2."""
    return -(-(1 << 32) // divisor)


def chunk_tokens(tokens: int, token_units: int, batch_units: int, ctas: int) -> int:
    """The number of tokens that a CTA takes at a time, so that the one with the most has as little to do as possible.

    It copies batches of units, which end with a chunk.
    """

    def cost(chunk: int) -> float:
        chunks = -(-tokens // chunk)
        return -(-chunks // ctas) * (-(-chunk * token_units // batch_units) + _PLACES_COST)

    return min(range(1, CONSTANTS.append_chunk_tokens + 1), key=cost)


def _chunked(selection: AppendSelection, problem: AppendProblem) -> tuple[AppendSelection, int]:
    """The selection with no more CTAs than there are chunks, and the tokens of a chunk."""
    loads = 2 if selection.kernel.traits["quantise"] else 1  # of a unit
    batch_units = CONSTANTS.append_threads * CONSTANTS.append_loads // loads
    chunk = chunk_tokens(problem.tokens, problem.token_units, batch_units, selection.ctas)
    return replaced(selection, ctas=min(selection.ctas, -(-problem.tokens // chunk))), chunk


def resized_append(
    launch: NativeLaunch[AppendSelection], selection: AppendSelection, problem: AppendProblem
) -> NativeLaunch[AppendSelection]:
    """``append_launch``, made of that of a problem with other numbers of tokens, requests and listed pages."""
    selection, chunk = _chunked(selection, problem)
    values = {"batch": problem.batch, "tokens": problem.tokens, "columns": problem.columns, "chunk_tokens": chunk}
    return launch.resized(selection, selection.grid(problem), values)


def append_launch(
    selection: AppendSelection, problem: AppendProblem, file: KernelFile
) -> NativeLaunch[AppendSelection]:
    """The launch of a KV append.

    A run's values are the tensors' addresses by name, that of the status word, and ``NUMBERS``.
    """
    selection, chunk = _chunked(selection, problem)
    quantises = bool(selection.kernel.traits["quantise"])
    strides = kv_scale_strides(problem.k_scale_strides, problem.v_scale_strides) if quantises else {}
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(problem),
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values={**problem.values(), **strides, "chunk_tokens": chunk},
        regions=(STATUS,),
        why=selection,
        numbers=NUMBERS,
    )
    return NativeLaunch(selection, plan, (STATUS,))
