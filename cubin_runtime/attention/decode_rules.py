"""The common part of paged and MLA decodes: tensors, options, the rules of a call, and values of their problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dtypes import DTYPES
from ..errors import UsageError
from ..kernels.native.problem import Dealing
from ..values import dataclass
from .attention_operator import SCALE_TENSORS, AttentionCall, AttentionOptions
from .checks import check_shape, token_stride
from .operator import LENGTHS, TensorArg
from .paged_cache import MOST_KEYS
from .resizing import Sizes

# Elements of a word of a token's mask, and its bits.
MASK_ELEMENTS = {"uint16": 2, "uint32": 1}
MASK_BITS = 32
GLOBAL_LENS = TensorArg("global_seq_lens", LENGTHS, optional=True, contiguous=True)
DEALING_OPTIONS = ("cp_world", "cp_rank", "cp_interleave")
_MAX_TILES = 1 << 31
_SMALLEST_TILE = 64
_SMALLEST_ROWS = 8


def decode_tensors(
    q: TensorArg, caches: Sequence[TensorArg], out: TensorArg, *more: TensorArg
) -> tuple[TensorArg, ...]:
    """The tensors of a decode: its own queries, caches and output, what all decodes take, and ``more``."""
    return (
        q,
        *caches,
        TensorArg("page_table", ("int32",), rows=True),
        TensorArg("seq_lens", LENGTHS, rows=True),
        out,
        TensorArg("lse", ("float32",), optional=True, written=True),
        TensorArg("q_cu_seq_lens", LENGTHS, optional=True, contiguous=True),
        TensorArg("mask", tuple(MASK_ELEMENTS), optional=True, contiguous=True),
        TensorArg("sinks", ("float32",), optional=True, contiguous=True),
        *SCALE_TENSORS,
        *more,
    )


@dataclass(frozen=True, slots=True)
class DecodeOptions(AttentionOptions):
    """The options that all decodes have, beside those of all attention: the ranks that keys are dealt to."""

    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    def keys_of_all_ranks(self, keys: int) -> int:
        """A bound on the keys of a request on all ranks, of which this one has ``keys``."""
        return keys if self.cp_world == 1 else (keys + self.cp_interleave) * self.cp_world


def mask_words(q_len: int) -> int:
    """The words of a token's mask: a bit for each query token of a request, of which ``q_len`` is the bound."""
    return -(-q_len // MASK_BITS)


def check_queries(call: AttentionCall, most: int) -> None:
    """Check q, the running sum of query tokens and their bound against each other; ``most`` tokens per request."""
    shape, bound = call.q.shape, call.options.max_q_len
    if not call.ragged:
        if len(shape) not in (3, 4):
            raise UsageError(
                f"shape {shape}, expected [batch, q_heads, head_dim] or [batch, q_len, q_heads, head_dim]", argument="q"
            )
        if bound is not None:
            raise UsageError("expected only with q_cu_seq_lens", argument="max_q_len", value=bound)
        if shape[0] < 1:
            raise UsageError(f"shape {shape}, expected a batch of 1 or more", argument="q")
        if not 1 <= (call.own_q_len or 0) <= most:
            raise UsageError(f"{call.own_q_len} tokens per request, expected 1 to {most}", argument="q")
        return
    if len(shape) != 3 or shape[0] < 1:
        raise UsageError(
            f"shape {shape} with q_cu_seq_lens, expected [tokens, q_heads, head_dim] of 1 token or more", argument="q"
        )
    lens = call.tensors["seq_lens"].shape
    if len(lens) != 1 or lens[0] < 1:
        raise UsageError(f"shape {lens}, expected (batch,) of 1 or more", argument="seq_lens")
    check_shape("q_cu_seq_lens", call.tensors["q_cu_seq_lens"], (lens[0] + 1,))
    if bound is None:
        raise UsageError(f"None with q_cu_seq_lens, expected a bound from 1 to {most}", argument="max_q_len")
    if not 1 <= bound <= most:
        raise UsageError(f"expected 1 to {most}", argument="max_q_len", value=bound)


def check_shapes(call: AttentionCall, out: tuple[int, ...], kv_heads: int) -> None:
    """Check the shapes of all tensors but q, caches and page table against those; ``out`` is the output's."""
    tensors, batch = call.tensors, call.batch
    tensors.check_shapes(
        out=[out],
        lse=[call.q.shape[:-1]],
        seq_lens=[(batch,)],
        sinks=[(call.q_heads,), (kv_heads, call.q_heads // kv_heads)],
    )
    mask = tensors.get("mask")
    if mask is not None:
        elements = MASK_ELEMENTS[mask.dtype] * mask_words(call.q_len)
        by_request = () if call.own_q_len is None else ((batch, call.own_q_len, elements),)
        check_shape("mask", mask, (call.tokens, elements), *by_request)


def check_options(call: AttentionCall, *, page_size: int, kv_heads: int) -> None:
    """Check the bound on the keys, and the ranks that they are dealt to."""
    options = call.options
    bound, columns = options.max_seq_len, call.tensors["page_table"].shape[-1]
    capacity = columns * page_size
    if not 0 <= bound <= capacity:
        raise UsageError(
            f"expected 0 to {capacity}, which is what the page table's {columns} columns hold",
            argument="max_seq_len",
            value=bound,
        )
    if bound > MOST_KEYS:
        raise UsageError(f"expected at most {MOST_KEYS}", argument="max_seq_len", value=bound)
    tiles = _most_tiles(call, kv_heads, call.batch, call.q_len)
    if tiles >= _MAX_TILES:
        raise UsageError(f"batch x KV heads x max_seq_len={bound}: {tiles} tiles, expected below {_MAX_TILES}")
    world, rank, interleave = options.cp_world, options.cp_rank, options.cp_interleave
    if GLOBAL_LENS.name in call.tensors:
        _check_dealing(call, world, rank, interleave)
    elif (world, rank, interleave) != (1, 0, 1):
        raise UsageError(
            f"cp_world={world}, cp_rank={rank}, cp_interleave={interleave}: expected 1, 0 and 1 without global_seq_lens"
        )


def _most_tiles(call: AttentionCall, kv_heads: int, batch: int, q_len: int) -> int:
    """The most tiles of a call like one with so many requests and query tokens of each."""
    rows = q_len * (call.q_heads // kv_heads)
    output_tiles = batch * kv_heads * -(-rows // _SMALLEST_ROWS)
    return int(output_tiles * (call.options.max_seq_len // _SMALLEST_TILE + 1))


def fits_like(call: AttentionCall, *, most: int, kv_heads: int) -> Callable[[Sizes], bool]:
    """A function that says whether a decode like ``call`` may have these sizes; ``most`` tokens per request."""
    words = mask_words(call.q_len) if "mask" in call.tensors else None

    def fits(sizes: Sizes) -> bool:
        batch, q_len = sizes["batch"], sizes["q_len"]
        return (
            sizes["tokens"] >= 1
            and 1 <= q_len <= most
            and words in (None, mask_words(q_len))
            and _most_tiles(call, kv_heads, batch, q_len) < _MAX_TILES
        )

    return fits


def _check_dealing(call: AttentionCall, world: int, rank: int, interleave: int) -> None:
    """Check the lengths on all ranks and the ranks against each other and the rest of the call."""
    tensors, options = call.tensors, call.options
    check_shape("global_seq_lens", tensors["global_seq_lens"], (call.batch,))
    if world < 2:
        raise UsageError("expected 2 or more with global_seq_lens", argument="cp_world", value=world)
    if not 0 <= rank < world:
        raise UsageError(f"expected 0 to {world - 1}, below cp_world", argument="cp_rank", value=rank)
    if interleave < 1:
        raise UsageError("expected 1 or more", argument="cp_interleave", value=interleave)
    if options.keys_of_all_ranks(options.max_seq_len) > MOST_KEYS:
        raise UsageError(
            f"(max_seq_len + cp_interleave) x cp_world={options.keys_of_all_ranks(options.max_seq_len)}: expected at "
            f"most {MOST_KEYS} keys on all ranks"
        )
    if tensors.get("mask") is not None:
        raise UsageError("given with global_seq_lens, expected None: query tokens are causal", argument="mask")
    if tensors.get("sinks") is not None:
        raise UsageError(
            "given with global_seq_lens, expected None: the merge of the ranks counts them once", argument="sinks"
        )


def problem_values(call: AttentionCall) -> dict[str, Any]:
    """The sizes, strides and options of a native problem that are the same for all decodes."""
    tensors, options, q = call.tensors, call.options, call.q
    out, lse = tensors["out"], tensors.get("lse")
    softmax_scale, output_scale = options.factors
    return {
        "batch": call.batch,
        "tokens": call.tokens,
        "q_len": call.q_len,
        "q_dtype": DTYPES[q.dtype].short,
        "out_dtype": DTYPES[out.dtype].short,
        "softmax_scale": softmax_scale,
        "output_scale": output_scale,
        "q_strides": (token_stride("q", q, 2), q.strides[-2]),
        "out_strides": (token_stride("out", out, 2), out.strides[-2]),
        "lse_strides": (token_stride("lse", lse, 1), lse.strides[-1]) if lse else (0, 0),
        "table_stride": tensors["page_table"].strides[0],
        "programmatic_serialization": bool(options.enable_pdl),
        "dealing": Dealing(options.cp_world, options.cp_rank, options.cp_interleave),
    }
