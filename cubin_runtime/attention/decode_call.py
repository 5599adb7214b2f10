"""One decode call as a value: its tensors, its options, and the rules that all decodes share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..dtypes import DTYPES
from ..errors import UsageError
from ..kernels.native.context_parallel import Dealing
from ..tensor import TensorView
from ..values import dataclass
from .backends import AUTO
from .checks import check_dtype, check_shape, integer
from .operator import CallTensors, TensorArg
from .paged_cache import MOST_KEYS
from .scales import flat_scalar, float32_number

LENGTHS = ("int32", "uint32")
# Elements of a word of a token's mask, and its bits.
MASK_ELEMENTS = {"uint16": 2, "uint32": 1}
MASK_BITS = 32
GLOBAL_LENS = TensorArg("global_seq_lens", LENGTHS, optional=True, contiguous=True)
DRAFT_POSITIONS = ("depth", "index")
KV_SCALES = ("k_scale", "v_scale")
E4M3 = "float8_e4m3fn"
# In any of the forms of ``check_kv_scales``, with any strides.
KV_SCALE_TENSORS = tuple(
    TensorArg(name, ("float32",), optional=True, canonical=lambda view, _: flat_scalar(view)) for name in KV_SCALES
)
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
        *(
            TensorArg(name, ("float32",), optional=True, scalar=True, value=f"{name}_device")
            for name in ("softmax_scale", "output_scale")
        ),
        *more,
    )


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """The options of a decode; see ``paged_decode``. A scale on the device is 1 here.

    ``max_q_len`` is given where requests have query tokens of different number, and only there.
    """

    max_seq_len: int
    softmax_scale: float = 1.0
    output_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    kv_layout: str = "NHD"
    max_q_len: int | None = None
    window_left: int = -1
    draft_position: str = "depth"
    batch_invariant: bool = False
    backend: str = AUTO
    enable_pdl: bool | None = False
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    @property
    def drafts_by_index(self) -> bool:
        """Return whether the window of a query token with a mask counts from its index, not from its depth."""
        return self.draft_position == "index"

    def keys_of_all_ranks(self, keys: int) -> int:
        """A bound on the keys of a request on all ranks, of which this one has ``keys``."""
        return keys if self.cp_world == 1 else (keys + self.cp_interleave) * self.cp_world


class DecodeCall:
    """The tensors and options of one decode, and what follows from them; immutable.

    ``ragged``: its requests have query tokens of different number.
    """

    __slots__ = ("options", "q", "ragged", "tensors")

    def __init__(self, tensors: CallTensors, options: DecodeOptions) -> None:
        self.tensors, self.options = tensors, options
        self.q: TensorView = tensors["q"]
        self.ragged = tensors.get("q_cu_seq_lens") is not None

    @property
    def batch(self) -> int:
        """Requests."""
        return self.tensors["seq_lens"].shape[0] if self.ragged else self.q.shape[0]

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return prod(self.q.shape[:-2])

    @property
    def own_q_len(self) -> int | None:
        """Query tokens of each request; None where they differ."""
        if self.ragged:
            return None
        shape = self.q.shape
        return shape[1] if len(shape) == 4 else 1

    @property
    def q_len(self) -> int:
        """Query tokens of each request, or their bound."""
        return self.own_q_len or self.options.max_q_len or 1

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.q.shape[-2]


def mask_words(q_len: int) -> int:
    """The words of a token's mask: a bit for each query token of a request, of which ``q_len`` is the bound."""
    return -(-q_len // MASK_BITS)


def check_queries(call: DecodeCall, most: int) -> None:
    """Check q, the running sum of query tokens and their bound against each other; ``most`` tokens per request."""
    shape, bound = call.q.shape, call.options.max_q_len
    if not call.ragged:
        if len(shape) not in (3, 4):
            raise UsageError(
                f"q: shape {shape}, expected [batch, q_heads, head_dim] or [batch, q_len, q_heads, head_dim]"
            )
        if bound is not None:
            raise UsageError(f"max_q_len={bound}: expected only with q_cu_seq_lens")
        if shape[0] < 1:
            raise UsageError(f"q: shape {shape}, expected a batch of 1 or more")
        if not 1 <= (call.own_q_len or 0) <= most:
            raise UsageError(f"q: {call.own_q_len} tokens per request, expected 1 to {most}")
        return
    if len(shape) != 3 or shape[0] < 1:
        raise UsageError(
            f"q: shape {shape} with q_cu_seq_lens, expected [tokens, q_heads, head_dim] of 1 token or more"
        )
    lens = call.tensors["seq_lens"].shape
    if len(lens) != 1 or lens[0] < 1:
        raise UsageError(f"seq_lens: shape {lens}, expected (batch,) of 1 or more")
    if bound is None:
        raise UsageError(f"max_q_len: None with q_cu_seq_lens, expected a bound from 1 to {most}")
    if not 1 <= integer("max_q_len", bound) <= most:
        raise UsageError(f"max_q_len={bound}: expected 1 to {most}")


def check_query_bounds(view: TensorView) -> None:
    """Check ``q_cu_seq_lens`` as far as that needs no other tensor: before it is read back."""
    check_dtype("q_cu_seq_lens", view, LENGTHS)
    if len(view.shape) != 1:
        raise UsageError(f"q_cu_seq_lens: shape {view.shape}, expected (batch + 1,)")


def check_shapes(call: DecodeCall, out: tuple[int, ...], kv_heads: int) -> None:
    """Check the shapes of all tensors but q, caches and page table against those; ``out`` is the output's."""
    tensors, batch = call.tensors, call.batch
    check_shape("out", tensors["out"], out)
    check_shape("lse", tensors.get("lse"), call.q.shape[:-1])
    check_shape("seq_lens", tensors["seq_lens"], (batch,))
    check_shape("q_cu_seq_lens", tensors.get("q_cu_seq_lens"), (batch + 1,))
    mask = tensors.get("mask")
    if mask is not None:
        elements = MASK_ELEMENTS[mask.dtype] * mask_words(call.q_len)
        by_request = () if call.own_q_len is None else ((batch, call.own_q_len, elements),)
        check_shape("mask", mask, (call.tokens, elements), *by_request)
    check_shape("sinks", tensors.get("sinks"), (call.q_heads,), (kv_heads, call.q_heads // kv_heads))
    for name in ("softmax_scale", "output_scale"):
        scale = tensors.get(name)
        if scale is not None and prod(scale.shape) != 1:
            raise UsageError(f"{name}: shape {scale.shape}, expected one element")


def check_kv_scales(tensors: CallTensors, kv_dtype: str, batch: int, kv_heads: int) -> None:
    """Check the scales of keys and values that are tensors."""
    for name in KV_SCALES:
        scale = tensors.get(name)
        if scale is None:
            continue
        check_shape(name, scale, (1,), (kv_heads,), (batch, kv_heads))
        if kv_dtype != E4M3:
            raise UsageError(f"{name}: a tensor with {kv_dtype} keys and values, expected a number or None")


def scale_strides(view: TensorView | None) -> tuple[int, int]:
    """Elements between the scales of requests and between those of KV heads; 0 where all have one."""
    if view is None or prod(view.shape) == 1:
        return 0, 0
    return (0, view.strides[0]) if len(view.shape) == 1 else (view.strides[0], view.strides[1])


def check_token_strides(call: DecodeCall) -> None:
    """All query tokens of q, out and lse lie at one stride."""
    token_stride("q", call.q, 2)
    token_stride("out", call.tensors["out"], 2)
    lse = call.tensors.get("lse")
    if lse is not None:
        token_stride("lse", lse, 1)


def check_options(call: DecodeCall, *, page_size: int, kv_heads: int) -> None:
    """Check bounds and numbers."""
    options = call.options
    bound, columns = integer("max_seq_len", options.max_seq_len), call.tensors["page_table"].shape[-1]
    capacity = columns * page_size
    if not 0 <= bound <= capacity:
        raise UsageError(
            f"max_seq_len={bound}: expected 0 to {capacity}, which is what the page table's {columns} columns hold"
        )
    rows = call.q_len * (call.q_heads // kv_heads)
    output_tiles = call.batch * kv_heads * -(-rows // _SMALLEST_ROWS)
    tiles = output_tiles * (bound // _SMALLEST_TILE + 1)
    if tiles >= _MAX_TILES:
        raise UsageError(f"batch x KV heads x max_seq_len={bound}: {tiles} tiles, expected below {_MAX_TILES}")
    if not -1 <= integer("window_left", options.window_left) < 1 << 31:
        raise UsageError(f"window_left={options.window_left}: expected -1 (none) or more, below 2^31")
    if options.draft_position not in DRAFT_POSITIONS:
        raise UsageError(
            f"draft_position={options.draft_position!r}: expected {' or '.join(map(repr, DRAFT_POSITIONS))}"
        )
    for name in ("softmax_scale", "output_scale", *KV_SCALES):
        float32_number(name, getattr(options, name))
    _check_dealing(call)


def _check_dealing(call: DecodeCall) -> None:
    """Check the lengths on all ranks and the ranks against each other and the rest of the call."""
    tensors, options = call.tensors, call.options
    world, rank = integer("cp_world", options.cp_world), integer("cp_rank", options.cp_rank)
    interleave = integer("cp_interleave", options.cp_interleave)
    if tensors.get(GLOBAL_LENS.name) is None:
        if (world, rank, interleave) != (1, 0, 1):
            raise UsageError(
                f"cp_world={world}, cp_rank={rank}, cp_interleave={interleave}: expected 1, 0 and 1 without "
                "global_seq_lens"
            )
        return
    check_shape("global_seq_lens", tensors["global_seq_lens"], (call.batch,))
    if world < 2:
        raise UsageError(f"cp_world={world}: expected 2 or more with global_seq_lens")
    if not 0 <= rank < world:
        raise UsageError(f"cp_rank={rank}: expected 0 to {world - 1}, below cp_world")
    if interleave < 1:
        raise UsageError(f"cp_interleave={interleave}: expected 1 or more")
    if options.keys_of_all_ranks(options.max_seq_len) > MOST_KEYS:
        raise UsageError(
            f"(max_seq_len + cp_interleave) x cp_world={options.keys_of_all_ranks(options.max_seq_len)}: expected at "
            f"most {MOST_KEYS} keys on all ranks"
        )
    if tensors.get("mask") is not None:
        raise UsageError("mask: given with global_seq_lens, expected None: query tokens are causal")
    if tensors.get("sinks") is not None:
        raise UsageError("sinks: given with global_seq_lens, expected None: the merge of the ranks counts them once")


def token_stride(name: str, view: TensorView, trailing: int) -> int:
    """Elements between the query tokens of ``view``, whose last ``trailing`` dimensions belong to one token.

    In front of them stands ``[tokens]`` or ``[batch, q_len]``; the latter must lie like the former.

    Raises:
        UsageError: they do not; the message names the tensor.
    """
    leading = len(view.shape) - trailing
    shape, strides = view.shape[:leading], view.strides[:leading]
    if len(shape) == 1 or shape[1] == 1:
        return strides[0]
    (batch, q_len), (request, token) = shape, strides
    if batch > 1 and request != q_len * token:
        raise UsageError(
            f"{name}: strides {view.strides}, expected one stride between all tokens: {q_len * token} elements between "
            f"requests of {q_len} tokens {token} elements apart"
        )
    return token


def problem_values(call: DecodeCall) -> dict[str, Any]:
    """The sizes, strides and options of a native problem that are the same for all decodes."""
    tensors, options, q = call.tensors, call.options, call.q
    out, lse = tensors["out"], tensors.get("lse")
    return {
        "batch": call.batch,
        "tokens": call.tokens,
        "q_len": call.q_len,
        "q_dtype": DTYPES[q.dtype].short,
        "out_dtype": DTYPES[out.dtype].short,
        "softmax_scale": options.softmax_scale * options.k_scale,
        "output_scale": options.output_scale * options.v_scale,
        "q_strides": (token_stride("q", q, 2), q.strides[-2]),
        "out_strides": (token_stride("out", out, 2), out.strides[-2]),
        "lse_strides": (token_stride("lse", lse, 1), lse.strides[-1]) if lse else (0, 0),
        "table_stride": tensors["page_table"].strides[0],
        "programmatic_serialization": bool(options.enable_pdl),
        "dealing": Dealing(options.cp_world, options.cp_rank, options.cp_interleave),
    }
