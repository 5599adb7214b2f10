"""The functions as ``torch.library`` ops, for calls that torch traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...attention.checks import shown
from ...attention.torch_ops import TORCH_SCRATCH, TorchOp
from ...errors import UsageError
from ...tensor import dtype_word
from .arguments import only_sinks

_SINKS = ("sinks", "attention_sinks")
_KINDS = {
    **dict.fromkeys(("query", "q", "key", "value", "k_cache", "v_cache"), "Tensor"),
    **dict.fromkeys(("block_tables", "page_table", "out", "output", "cum_seq_lens_kv"), "Tensor"),
    **dict.fromkeys((*_SINKS, "mask", "q_cu_seq_lens", "lse", "sparse_mla_top_k_lens"), "Tensor?"),
    **dict.fromkeys(("bmm1_scale", "bmm2_scale", "q_scale", "kv_scale"), "Scale"),
    **dict.fromkeys(("max_seq_len", "window_left", "max_kv_len", "batch_size", "sliding_win_size"), "SymInt"),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "sparse_mla_top_k"), "SymInt"),
    **dict.fromkeys(("num_kv_heads", "page_size", "q_seq_len"), "SymInt"),
    **dict.fromkeys(("q_len_per_req", "max_q_len", "sm_count"), "SymInt?"),
    **dict.fromkeys(("o_scale", "o_sf_scale", "skip_softmax_threshold_scale_factor"), "float?"),
    **dict.fromkeys(("rcp_out_scale",), "float"),
    **dict.fromkeys(("kv_layout", "backend", "kv_scale_format"), "str"),
    **dict.fromkeys(("batch_invariant", "causal", "is_causal", "uses_shared_paged_kv_idx", "enable_dcp"), "bool"),
    **dict.fromkeys(("cp_world", "cp_rank"), "int"),
    **dict.fromkeys(("seq_lens", "cum_seq_lens_q", "causal_seqlens_kv_global"), "Tensor?"),
    "enable_pdl": "bool?",
    "kv_cache": "Tensor[]",
}
_SCRATCH = ("workspace_buffer", "semaphores", "multi_ctas_kv_counter_buffer")
_DROPPED = frozenset({*_SCRATCH, "return_lse", "out_dtype"})


def _query_shape(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(arguments["query"].shape)


def torch_op(
    function: Callable[..., Any],
    shape: Callable[[Mapping[str, Any]], tuple[int, ...]] = _query_shape,
    dtype: str = "",
    dtype_of_bytes: str = "",
) -> TorchOp:
    """The op of one of FlashInfer's functions.

    ``shape`` gives that of an output which a call leaves out; its dtype is ``out_dtype``, else ``dtype``, else
    ``dtype_of_bytes`` for queries of 8 bits, else the query's.
    """
    parameters = inspect.signature(function).parameters
    kinds = {name: _KINDS[name] for name in parameters if name in _KINDS}
    fixed = {name: parameter.default for name, parameter in parameters.items() if name not in kinds}
    fixed |= {"workspace_buffer": TORCH_SCRATCH, "semaphores": TORCH_SCRATCH, "return_lse": False}
    written = tuple(name for name in ("out", "output", "lse") if name in parameters)
    fixed = {name: value for name, value in fixed.items() if name in parameters}

    def complete(arguments: dict[str, Any]) -> Any:
        import torch

        for name in _SINKS:
            if name in arguments:
                arguments[name] = only_sinks(arguments[name], name)
        query = arguments["query"] if "query" in arguments else arguments["q"]
        if "output" in arguments:
            return None
        out_dtype = _torch_dtype(arguments.get("out_dtype"))
        if arguments["out"] is None:
            default = dtype or (dtype_of_bytes if query.element_size() == 1 else "")
            new_dtype = out_dtype or (getattr(torch, default) if default else query.dtype)
            arguments["out"] = torch.empty(shape(arguments), dtype=new_dtype, device=query.device)
        elif out_dtype is not None and arguments["out"].dtype != out_dtype:
            one, other = (dtype_word(of) for of in (arguments["out"].dtype, out_dtype))
            raise UsageError(f"dtype {one}, out_dtype says {other}", argument="out")
        if not arguments.get("return_lse"):
            return arguments["out"]
        if arguments["lse"] is None:
            tokens = query.numel() // (query.shape[-1] * query.shape[-2])
            arguments["lse"] = torch.empty((tokens, query.shape[-2]), dtype=torch.float32, device=query.device)
        return arguments["out"], arguments["lse"]

    return TorchOp(f"flashinfer_{function.__name__}", kinds, written, fixed, complete, _DROPPED)


def _torch_dtype(out_dtype: Any) -> Any:
    """The dtype of an output where torch traces the call; None: the default.

    Raises:
        UsageError: no op has such an output.
    """
    import torch

    dtype = getattr(torch, out_dtype, out_dtype) if isinstance(out_dtype, str) else out_dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UsageError(
            "expected None or a dtype of torch in a call that torch traces",
            argument="out_dtype",
            value=shown(out_dtype),
        )
    return dtype
