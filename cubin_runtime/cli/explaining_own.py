"""``explain --backend hopper``: what the flags say, which backend explains them, and which of our decodes they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from ..config import Config

BACKENDS = ("auto", "hopper", "trtllm-gen")
OUT_DTYPES = ("bf16", "fp16", "e4m3")
DEFAULT_SM = 90
DEFAULT_HEADS_KV = 8
THEIR_SMS = (100, 103)
# Columns of a row of an MLA cache, and the latent ones of them; any other head dimension is paged decode's.
LATENTS: Mapping[int, int] = MappingProxyType({576: 512, 320: 256})
# Options of the verb, by the names of its parameters: of this backend alone, and of the other alone.
OURS = frozenset({"batch_invariant", "tokens", "gpu"})
THEIRS = frozenset(
    {"case", "cases", "out", "both", "top_k", "causal", "multi_ctas", "skip_softmax"}
    | {"workspace", "occupancy", "policy"}
)
# What our decodes have too, as a value of the launch.
DECIDES_NOTHING = frozenset({"lse", "pdl"})


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags say; None where a flag was not given. ``window`` counts visible tokens, 0 for all."""

    operation: str
    sm: int | None
    multiprocessors: int | None
    gpu: str | None
    batch: int
    q_len: int
    tokens: int | None
    kv_len: int
    heads_q: int
    heads_kv: int | None
    head_dim: int
    head_dim_v: int | None
    page: int
    dtype_q: str | None
    dtype_kv: str
    dtype_out: str | None
    window: int
    batch_invariant: bool

    def check_sizes(self, most_q_len: int, most_heads: int, page_sizes: Sequence[int]) -> None:
        """Hold what both decodes have against its bounds.

        Raises:
            UsageError: the message names the flag, what came and what was expected.
        """
        most = (1 << 31) - 1
        counts = (
            ("--batch", self.batch, most),
            ("--q-len", self.q_len, most_q_len),
            ("--kv-len", self.kv_len, most),
            ("--heads-q", self.heads_q, most_heads),
            ("--head-dim", self.head_dim, most),
        )
        for flag, value, bound in counts:
            if not 1 <= value <= bound:
                raise UsageError(f"{flag} {value}: expected 1 to {bound}")
        if self.page not in page_sizes:
            raise UsageError(f"--page {self.page}: expected one of {', '.join(map(str, page_sizes))}")
        if self.tokens is not None and not 0 <= self.tokens <= self.batch * self.q_len:
            raise UsageError(f"--tokens {self.tokens}: expected 0 to batch x q_len, {self.batch * self.q_len}")

    def query_dtype(self, q_dtypes: Mapping[str, Sequence[str]]) -> str:
        """The type of the queries: as given, or the first of those that ``q_dtypes`` has for the cache's.

        ``q_dtypes`` is in torch's names, as the decode checks tensors by it; flags and result are in the CLI's.

        Raises:
            UsageError: a type is not among those that there are.
        """
        from ..dtypes import DTYPES

        by_cache = {DTYPES[kv].short: [DTYPES[q].short for q in taken] for kv, taken in q_dtypes.items()}
        q_types = by_cache.get(self.dtype_kv)
        if q_types is None:
            raise UsageError(f"--dtype-kv {self.dtype_kv!r}: expected one of {', '.join(by_cache)}")
        found = self.dtype_q or q_types[0]
        if found not in q_types:
            raise UsageError(
                f"--dtype-q {self.dtype_q!r}: expected {' or '.join(q_types)} with --dtype-kv {self.dtype_kv}"
            )
        if (self.dtype_out or found) not in OUT_DTYPES:
            raise UsageError(f"--dtype-out {self.dtype_out!r}: expected one of {', '.join(OUT_DTYPES)}")
        return found


def takes(context: typer.Context, backend: str, sm: int | None) -> bool:
    """Whether the hopper backend explains this call: by its name, or where it is what ``auto`` takes.

    Raises:
        UsageError: the backend is unknown, or an option was given that decides nothing or is the other one's.
        BackendError: ``auto`` takes none on this GPU.
    """
    from ..attention.backends import AUTO, HOPPER, resolve_backend
    from ..kernels.native.device_models import describe_device

    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    given = {name for name in context.params if _is_given(context, name)}
    operator = "mla_decode" if context.params["head_dim"] in LATENTS else "paged_decode"
    ours = backend == HOPPER
    if backend == AUTO and sm is not None and not given & {"case", "cases"}:
        ours = sm not in THEIR_SMS and resolve_backend(operator, AUTO, describe_device(sm)) == HOPPER
    for name in sorted(given & (THEIRS if ours else OURS)):
        words, other = ("hopper", "trtllm-gen") if ours else ("trtllm-gen", "hopper")
        raise UsageError(f"{_flag(context, name)}: not an option of --backend {words}, only of {other}")
    for name in sorted(given & DECIDES_NOTHING if ours else ()):
        raise UsageError(
            f"{_flag(context, name)}: decides nothing with --backend hopper, whose choice is the same with and without"
        )
    return ours


def explain(config: Config, release: str | None, asked: Asked, json: bool) -> None:
    """Print the choice for ``asked`` among the kernels of a release of ours."""
    from ..attention.runtime import OWN_RELEASE, Runtime
    from ..kernels.native.device_models import describe_device
    from . import explaining_decode, explaining_mla

    if asked.operation != "decode":
        raise UsageError(f"--op {asked.operation!r}: the hopper backend has decode")
    decode = explaining_mla if asked.head_dim in LATENTS else explaining_decode
    shape = decode.shape_of(asked)
    device = describe_device(DEFAULT_SM if asked.sm is None else asked.sm, asked.multiprocessors, asked.gpu)
    kernels = Runtime(config, release=release or OWN_RELEASE).own_release().kernels
    decode.explain(kernels, shape, device, json)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(context: typer.Context, name: str) -> str:
    option = next(parameter for parameter in context.command.params if parameter.name == name)
    return "CASE.json" if name == "case" else option.opts[0]
