"""The arguments of one call of a FlashInfer operator as typed values, with their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from ...attention.backends import find_backend
from ...attention.checks import OptionCheck, option_checks, shown
from ...attention.runtime import Runtime, default_runtime
from ...attention.trtllm_gen.checks import check_device
from ...errors import UsageError
from ...tensor import TensorView, view_of
from ...values import dataclass

if TYPE_CHECKING:
    from ...protocols import CompatBackend, CompatContextBackend, KvLayout
    from ...tensor import Scale, Tensor

# The arguments that numbers of a launch are products of, and those that are memory of no form.
SCALES = ("bmm1_scale", "bmm2_scale")
MEMORY = ("workspace_buffer", "semaphores", "multi_ctas_kv_counter_buffer")


class FP4Output(Protocol):
    """An FP4 output, ours or FlashInfer's; ``outputs.FP4Tensor`` says what it has."""

    @property
    def data(self) -> Any:
        """The elements."""

    @property
    def scale(self) -> Any:
        """The block scales."""

    @property
    def scale_start_index(self) -> int:
        """The first row of ``scale``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a call of ``operator``, whose annotations the options are checked by, and the runtime for it.

    A field that only some operators of a class have an argument for has a default.

    Raises:
        UsageError: an option is of another kind than its annotation says.
    """

    operator: Callable[..., Any]
    query: Tensor
    workspace_buffer: Tensor
    seq_lens: Tensor | None
    sinks: Tensor | None = None
    enable_pdl: bool | None
    batch_invariant: bool
    runtime: Runtime = field(default_factory=lambda: default_runtime())  # by name, which tests replace

    def __post_init__(self) -> None:
        for name, check, optional in _checks(self.operator):
            value = getattr(self, name)
            if value is not None or not optional:
                checked = check(name, value)
                if checked is not value:
                    object.__setattr__(self, name, checked)

    def refuse(self, *names: str, backend: str | None = None) -> None:
        """Refuse options that no kernel (of ``backend``) supports; None, False and an option's default are accepted.

        Raises:
            UsageError: another value; the message names the option.
        """
        for name in names:
            value, default = getattr(self, name), _defaults(self.operator)[name]
            is_plain = isinstance(value, (bool, int, float, str))
            if value is None or (is_plain and value == (default or False)):
                continue
            who = self.operator.__name__ + (f" by backend {backend!r}" if backend else "")
            raise UsageError(
                f"{who} has no kernel that honours it; expected {default!r}", argument=name, value=shown(value)
            )

    def backend_on(self, device: int, backend: str) -> str:
        """The backend that runs the operator on ``device``; errors as ``find_backend``."""
        return find_backend(self.operator.__name__, backend, self.runtime.driver.device(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArguments(Arguments):
    """The arguments of an operator with ``bmm1_scale`` and ``bmm2_scale``: all but ``xqa`` and ``xqa_mla``."""

    bmm1_scale: Scale
    bmm2_scale: Scale
    bmm1_scale_log2: Tensor | None = None
    window_left: int = -1
    skip_softmax_threshold_scale_factor: float | None = None
    max_q_len: int | None = None
    cum_seq_lens_q: Tensor | None = None
    out: Tensor | FP4Output | None
    out_dtype: Any = None
    o_sf_scale: float | None = None
    o_sf_vec_size: int | None = None
    lse: Tensor | None = None
    return_lse: bool = False
    multi_ctas_kv_counter_buffer: Tensor | None = None

    @property
    def fp4_scale(self) -> float | None:
        """The factor of the block scales of an FP4 output."""
        return self.o_sf_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedArguments(BatchArguments):
    """The arguments of an operator over a paged cache."""

    kv_cache: Tensor | Sequence[Tensor]
    kv_cache_sf: Tensor | Sequence[Tensor] | None = None
    kv_layout: KvLayout = "NHD"
    block_tables: Tensor
    uses_shared_paged_kv_idx: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeArguments(PagedArguments):
    """The arguments of a GQA decode operator."""

    max_seq_len: int
    q_len_per_req: int | None
    q_cu_seq_lens: Tensor | None = None
    o_scale: float | None
    mask: Tensor | None
    backend: CompatBackend = "xqa"
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: Tensor | None = None
    enable_block_sparse_attention: bool = False
    bf16q_fp8kv_transform_mode: Any = None
    request_order: Tensor | None = None
    request_order_plan: Any = None
    sparse_top_k: int = 0
    length_aware_schedule: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaArguments(PagedArguments):
    """The arguments of an MLA decode operator."""

    qk_nope_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    max_seq_len: int
    sparse_mla_top_k: int = 0
    enable_dcp: bool = False
    return_lse_base: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmMlaArguments(MlaArguments):
    """The arguments of ``trtllm_batch_decode_with_kv_cache_mla``."""

    sparse_mla_top_k_lens: Tensor | None
    backend: CompatBackend
    is_var_seq: bool
    cute_dsl_impl: str
    kv_scale_format: str
    cp_world: int
    cp_rank: int
    causal_seqlens_kv_global: Any
    use_fp16_softmax: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextArguments(PagedArguments):
    """The arguments of context attention over a paged cache."""

    max_q_len: int
    max_kv_len: int
    batch_size: int
    cum_seq_lens_q: Tensor
    cum_seq_lens_kv: Tensor
    causal: bool
    backend: CompatContextBackend
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None
    window_right: int
    variable_window_token_starts: Tensor | None
    variable_window_token_ends: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedArguments(BatchArguments):
    """The arguments of context attention over contiguous, ragged keys and values."""

    key: Tensor
    value: Tensor
    max_q_len: int
    max_kv_len: int
    batch_size: int
    cum_seq_lens_q: Tensor
    cum_seq_lens_kv: Tensor
    is_causal: bool
    sage_attn_sfs: tuple[Any, Any, Any, Any]
    num_elts_per_sage_attn_blk: tuple[int, int, int, int]
    backend: CompatContextBackend
    q_seq_lens_cpu: Any
    kv_seq_lens_cpu: Any
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None
    skip_all_rows_active_check: bool

    @property
    def fp4_scale(self) -> None:
        """No output is FP4: the kernel takes ``o_sf_scale`` as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XqaArguments(Arguments):
    """The arguments of an operator with separate semaphores and scratch."""

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    output: Tensor
    semaphores: Tensor
    num_kv_heads: int = 1
    page_size: int
    q_scale: Scale
    kv_scale: Scale
    rcp_out_scale: float = 1.0
    sliding_win_size: int = 0
    kv_layout: KvLayout = "NHD"
    sm_count: int | None
    q_seq_len: int = 1
    q_cu_seq_lens: Tensor | None = None
    mask: Tensor | None = None
    k_sf_cache: Tensor | None = None
    v_sf_cache: Tensor | None = None


@cache
def _checks(operator: Callable[..., Any]) -> tuple[OptionCheck, ...]:
    """The checks of the operator's options."""
    return option_checks(inspect.get_annotations(inspect.unwrap(operator)))


@cache
def _defaults(operator: Callable[..., Any]) -> Mapping[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(operator).parameters.items()}


def query_of(query: Any, rank: int) -> TensorView:
    """The view of a query; raises ``UsageError`` unless it has this rank."""
    view = view_of(query, "query")
    if len(view.shape) != rank:
        raise UsageError(f"shape {view.shape}, expected {rank} dimensions", argument="query")
    return view


def tensor_or_none(tensor: Any, name: str, device: int, *, written: bool = False) -> TensorView | None:
    """The view of an optional tensor; raises ``UsageError`` for one on another device.

    ``written`` is as in ``view_of``.
    """
    if tensor is None:
        return None
    view = view_of(tensor, name, written=written)
    check_device(name, view, device)
    return view


def sinks_of(sinks: Any, name: str, device: int) -> TensorView | None:
    """The view of the sinks; errors as ``only_sinks``, and ``UsageError`` for a tensor on another device."""
    return tensor_or_none(only_sinks(sinks, name), name, device)


def only_sinks(sinks: Any, name: str) -> Any:
    """The sinks, which FlashInfer also takes as a list of one tensor; raises ``UsageError`` for one of another length.

    Torch may be tracing them.
    """
    if not isinstance(sinks, (tuple, list)):
        return sinks
    if len(sinks) != 1:
        raise UsageError(f"{len(sinks)} tensors, expected one, or a list of one", argument=name)
    return sinks[0]
