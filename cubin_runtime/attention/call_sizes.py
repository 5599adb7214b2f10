"""A call as ``explain`` describes it, by sizes alone, and an operator's part in that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..dtypes import DTYPES
from ..errors import UsageError
from ..values import dataclass

if TYPE_CHECKING:
    from ..artifacts.tables.native_kernels import NativeKernel
    from ..kernels.native.selection import Selection
    from ..launch.driver import DeviceFacts

MOST = (1 << 31) - 1
_OUT_DTYPES = ("bf16", "fp16", "e4m3")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """The sizes, types and options of a call; None is the operator's default.

    ``operation`` is decode, mla, context, sparse_mla, append, merge or draft_mask. ``q_len`` and ``kv_len`` are bounds
    on the lengths; of sparse_mla, ``kv_len`` are the entries of a list. ``tokens``, the query (or new) tokens of all
    requests, is given where query lengths differ. ``head_dim`` is that of Q and K; decode is mla with one that only
    rows of a latent cache have. Types are bf16, fp16 or e4m3. ``window`` counts visible tokens, 0 for all.
    ``soft_cap``: context attention with a logit soft cap. ``pdl``: programmatic dependent launch.
    """

    operation: str = "decode"
    batch: int = 1
    q_len: int = 1
    kv_len: int = 1024
    tokens: int | None = None
    heads_q: int = 32
    heads_kv: int | None = None
    head_dim: int = 128
    head_dim_v: int | None = None
    page: int = 32
    dtype_q: str | None = None
    dtype_kv: str = "bf16"
    dtype_out: str | None = None
    window: int = 0
    batch_invariant: bool = False
    soft_cap: bool = False
    pdl: bool = False

    def check(self, max_q_len: int, max_heads: int, page_sizes: Sequence[int]) -> None:
        """Check what all operators have against their bounds.

        Raises:
            UsageError: the message begins with ``name=value``.
        """
        bounds = {"batch": MOST, "q_len": max_q_len, "kv_len": MOST, "heads_q": max_heads, "head_dim": MOST}
        for name, most in bounds.items():
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"expected 1 to {most}", argument=name, value=getattr(self, name))
        if self.page not in page_sizes:
            raise UsageError(f"expected one of {', '.join(map(str, page_sizes))}", argument="page", value=self.page)
        if self.tokens is not None and not 0 <= self.tokens <= self.batch * self.q_len:
            raise UsageError(
                f"expected 0 to batch x q_len, {self.batch * self.q_len}", argument="tokens", value=self.tokens
            )

    def all_tokens(self) -> int:
        """The query (or new) tokens of all requests.

        Raises:
            UsageError: a number is outside of what any operator takes; the message begins with ``name=value``.
        """
        tokens = self.batch * self.q_len if self.tokens is None else self.tokens
        for name, value in (("batch", self.batch), ("q_len", self.q_len), ("tokens", tokens)):
            if not 1 <= value <= MOST:
                raise UsageError(f"expected 1 to {MOST}", argument=name, value=value)
        return tokens

    def check_only(self, why: str, **only: int) -> None:
        """Check sizes that may only be left out or have one value.

        Raises:
            UsageError: one has another; the message begins with ``name=value`` and ends with ``why``.
        """
        for name, value in only.items():
            if getattr(self, name) not in (None, value):
                raise UsageError(f"expected {value} {why}", argument=name, value=getattr(self, name))

    def query_dtype(self, q_dtypes: Mapping[str, Sequence[str]]) -> str:
        """The type of the queries: as given, or the first of those that ``q_dtypes`` has for the cache's.

        Raises:
            UsageError: a type is not supported; the message begins with ``name=value``.
        """
        by_cache = {DTYPES[kv].short: [DTYPES[q].short for q in queries] for kv, queries in q_dtypes.items()}
        q_types = by_cache.get(self.dtype_kv)
        if q_types is None:
            raise UsageError(f"expected one of {', '.join(by_cache)}", argument="dtype_kv", value=repr(self.dtype_kv))
        dtype = self.dtype_q or q_types[0]
        if dtype not in q_types:
            raise UsageError(
                f"expected {' or '.join(q_types)} with dtype_kv={self.dtype_kv}",
                argument="dtype_q",
                value=repr(self.dtype_q),
            )
        self.check_output_dtype(dtype)
        return dtype

    def check_output_dtype(self, default: str) -> None:
        """Check the type of an output that decodes write; None: ``default``.

        Raises:
            UsageError: it is another; the message begins with ``name=value``.
        """
        if (self.dtype_out or default) not in _OUT_DTYPES:
            raise UsageError(
                f"expected one of {', '.join(_OUT_DTYPES)}", argument="dtype_out", value=repr(self.dtype_out)
            )


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of an operator: which calls are its own, what their problem is, and what is chosen for it."""

    operator: str
    operation: str
    takes: Callable[[CallSizes], bool]
    shape: Callable[[CallSizes], Any]
    select: Callable[[Sequence[NativeKernel], Any, DeviceFacts], Sequence[Selection]]
