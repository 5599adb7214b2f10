"""The arguments of one call of a FlashInfer operator: shared ones, refused ones, optional tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...attention.backends import find_backend
from ...attention.checks import OptionCheck, check_options, option_checks, shown
from ...attention.process import default_runtime
from ...attention.runtime import Runtime
from ...attention.trtllm_gen.checks import check_device
from ...errors import UsageError
from ...tensor import TensorView, view_of

# The arguments that numbers of a launch are products of, and those that are memory of no form.
SCALES = ("bmm1_scale", "bmm2_scale")
MEMORY = ("workspace_buffer", "semaphores", "multi_ctas_kv_counter_buffer")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a call of ``operator``, and the runtime for it; fields are those that several operators have.

    A field that the operator has no argument for keeps its default.
    """

    operator: Callable[..., Any]
    runtime: Runtime
    query: Any
    workspace_buffer: Any
    seq_lens: Any
    enable_pdl: bool | None
    batch_invariant: bool
    kv_cache: Any = None
    kv_cache_sf: Any = None
    kv_layout: str = "NHD"
    block_tables: Any = None
    uses_shared_paged_kv_idx: bool = True
    max_seq_len: int = 0
    max_q_len: int | None = None
    cum_seq_lens_q: Any = None
    bmm1_scale: Any = 1.0
    bmm2_scale: Any = 1.0
    bmm1_scale_log2: Any = None
    o_scale: float | None = None
    q_scale: Any = 1.0
    kv_scale: Any = 1.0
    rcp_out_scale: float = 1.0
    window_left: int = -1
    mask: Any = None
    sinks: Any = None
    skip_softmax_threshold_scale_factor: float | None = None
    out: Any = None
    out_dtype: Any = None
    o_sf_scale: float | None = None
    o_sf_vec_size: int | None = None
    lse: Any = None
    return_lse: bool = False
    return_lse_base: str | None = None
    multi_ctas_kv_counter_buffer: Any = None
    semaphores: Any = None
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: Any = None
    enable_dcp: bool = False
    sparse_mla_top_k: int = 0
    sparse_mla_top_k_lens: Any = None
    kv_scale_format: str = "auto"

    @classmethod
    def of(cls, operator: Callable[..., Any], values: Mapping[str, Any], **renamed: Any) -> Arguments:
        """From the operator's ``locals()``; ``renamed`` are fields that it has under another name.

        Raises:
            UsageError: an option is of another kind than its annotation says.
        """
        call = object.__new__(cls)  # setting 40 frozen fields one by one would add microseconds to every call
        arguments = dict(values)
        check_options(_checks(operator), arguments)
        vars(call).update(arguments, operator=operator, runtime=default_runtime(), **renamed)
        return call

    def refuse(self, *names: str, backend: str | None = None) -> None:
        """Refuse options that no kernel (of ``backend``) supports; None, False and an option's default are accepted.

        Raises:
            UsageError: another value; the message names the option.
        """
        for name in names:
            value, default = vars(self)[name], _defaults(self.operator)[name]
            is_plain = isinstance(value, (bool, int, float, str))
            if value is None or (is_plain and value == (default or False)):
                continue
            came = shown(value)
            who = self.operator.__name__ + (f" by backend {backend!r}" if backend else "")
            raise UsageError(f"{name}={came}: {who} has no kernel that honours it; expected {default!r}")

    def backend_on(self, device: int, backend: str) -> str:
        """The backend that runs the operator on ``device``; errors as ``find_backend``."""
        return find_backend(self.operator.__name__, backend, self.runtime.driver.device(device))


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
        raise UsageError(f"query: shape {view.shape}, expected {rank} dimensions")
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
    """The view of the sinks, which FlashInfer also takes as a list of one tensor.

    Raises:
        UsageError: the list has another length, or the tensor is on another device.
    """
    if isinstance(sinks, (tuple, list)):
        if len(sinks) != 1:
            raise UsageError(f"{name}: {len(sinks)} tensors, expected one, or a list of one")
        sinks = sinks[0]
    return tensor_or_none(sinks, name, device)
