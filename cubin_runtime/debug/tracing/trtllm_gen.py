"""Calls of trtllm-gen kernels as traced calls."""

from __future__ import annotations

from ...dtypes import DTYPES
from ...kernels.trtllm_gen.call import NO_WINDOW, Call
from ...kernels.trtllm_gen.calls import ContextCall, DecodeCall, PagedCall, RaggedCall
from ...tensor import TensorView
from .decode import ONE, table_axes
from .references import of_attention, run_of
from .schema import Axis, Constant, Scalar, Tensor, TracedCall

_HEADS = (Constant("q_heads"), Constant("head_dim"))


def traced_trtllm_gen(call: Call) -> TracedCall | str:
    """A call of trtllm-gen kernels, or the reason why it cannot be traced."""
    kind = "decode" if isinstance(call, DecodeCall) else "context"
    reason = _without_form(call)
    if reason or not isinstance(call, PagedCall | RaggedCall):
        return f"trtllm-gen {kind}: {reason}"
    keys, arguments = _keys(call)
    shares = "value" not in {part.name for part in keys}
    numbers, scales = _scales(call)
    optional: list[tuple[str, TensorView | None, tuple[Axis, ...]]] = [
        ("cum_seq_lens_q", call.cum_seq_lens_q, ("batch_plus_1",)),
        ("sinks", call.sinks, (Constant("q_heads"),)),
    ]
    inputs: list[Tensor | Scalar] = [
        Tensor("query", call.query, ("tokens", *_HEADS)),
        *keys,
        Tensor("seq_lens", call.seq_lens, ("batch",), "keys of each request"),
        *(Tensor(name, view, axes) for name, view, axes in optional if view is not None),
        *numbers,
        Scalar("window_left", call.window_left, "int32"),
        Scalar("max_q", call.max_q, "int32"),
        Scalar("max_kv", call.max_kv, "int32"),
    ]
    names = {part.name for part in inputs}
    outputs = [Tensor("out", call.out, ("tokens", Constant("q_heads"), Constant("value_dim")))]
    if call.lse is not None:
        outputs.append(Tensor("lse", call.lse, ("tokens", Constant("q_heads")), "base 2"))
    reference_arguments = {"seq_lens": "seq_lens", "window_left": "window_left", **arguments, **scales, "q": "query"}
    renamed = (("q_cu_seq_lens", "cum_seq_lens_q"), ("sinks", "sinks"))
    reference_arguments |= {argument: name for argument, name in renamed if name in names}
    reference_arguments["causal"] = repr(call.causal if isinstance(call, ContextCall | RaggedCall) else True)
    form = "ragged" if call.cum_seq_lens_q is not None else "dense"
    dtypes = "_".join(DTYPES[view.dtype].short for view in (call.query, call.key, call.out))
    heads = {} if shares else {"group": call.query.shape[1] // call.key.shape[1]}
    paged = "paged" if isinstance(call, PagedCall) else "ragged"
    return TracedCall(
        op_type=f"{'mla' if shares else 'gqa'}_{paged}",
        name=f"trtllm_gen_{'mla_' if shares else ''}{kind}_{form}_{paged}_{dtypes}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        reference=run_of("context", inputs, reference_arguments | of_attention(outputs), without=tuple(names)),
        constants=heads,
        constraints=(
            *(("q_heads == kv_heads * group",) if heads else ()),
            *(("batch_plus_1 == batch + 1",) if names & {"cum_seq_lens_q", "cum_seq_lens_kv"} else ()),
        ),
        tags=(f"stage:{kind}", f"form:{form}", *(("batch_invariant",) if call.batch_invariant else ())),
        description=f"{'Latent' if shares else 'Grouped-query'} attention of {form} query tokens over {paged} keys",
    )


def _without_form(call: Call) -> str:
    """Name what of the call has no field, or no reference; empty if all has."""
    if not isinstance(call, PagedCall | RaggedCall) or (isinstance(call, DecodeCall) and call.top_k > 0):
        return "sparse keys"
    if "uint8" in (call.key.dtype, call.value.dtype, call.out.dtype):
        return "FP4 keys, values or output"
    if isinstance(call, RaggedCall) and any(call.sage.scales):
        return "scales of blocks of Q, K, P or V"
    if call.skip_softmax_factor:
        return "keys of little weight are skipped"
    if isinstance(call, RaggedCall) and not call.causal and call.window_left != NO_WINDOW:
        return "a window without a causal mask"
    if call.lse is not None and call.sinks is not None:
        return "a log-sum-exp with sinks"
    return ""


def _keys(call: PagedCall | RaggedCall) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of keys and values, and what the reference takes of them."""
    rest: tuple[Axis, ...] = (Constant("kv_heads"), Constant("head_dim"))
    values: tuple[Axis, ...] = (Constant("kv_heads"), Constant("value_dim"))
    if isinstance(call, RaggedCall):
        sums = Tensor("cum_seq_lens_kv", call.cum_seq_lens_kv, ("batch_plus_1",), "where each request's keys begin")
        tensors = [Tensor("key", call.key, ("kv_tokens", *rest)), Tensor("value", call.value, ("kv_tokens", *values))]
        return [*tensors, sums], {"k": "key", "v": "value", "kv_cu_seq_lens": "cum_seq_lens_kv"}
    page: tuple[Axis, ...] = ("pages", Constant("kv_heads"), Constant("page_size"))
    tensors = [Tensor("key", call.key, (*page, Constant("head_dim")), "as strides had it")]
    arguments = {"k": "key.transpose(1, 2)", "page_table": "block_tables"}
    latent = call.out.shape[-1]
    if latent < call.key.shape[-1]:
        arguments["v"] = f"key.transpose(1, 2)[..., :{latent}]"
    else:
        tensors.append(Tensor("value", call.value, (*page, Constant("value_dim"))))
        arguments["v"] = "value.transpose(1, 2)"
    return [*tensors, Tensor("block_tables", call.block_tables, table_axes(call.block_tables))], arguments


def _scales(call: Call) -> tuple[list[Tensor | Scalar], dict[str, str]]:
    """The scales of scores and output as inputs, and what the reference takes of them."""
    inputs = list[Tensor | Scalar]()
    reference_arguments = dict[str, str]()
    for argument, name, scale, factor in (
        ("softmax_scale", "bmm1_scale", call.bmm1, " * math.log(2)"),
        ("output_scale", "bmm2_scale", call.bmm2, ""),
    ):
        if scale.pointer:
            view = TensorView.contiguous(scale.pointer, "float32", (1,))
            inputs.append(Tensor(f"{name}_device", view, ONE, "with log2(e) in it" if factor else ""))
            reference_arguments[argument] = f"{name}_device.item(){factor}"
        else:
            inputs.append(Scalar(name, scale.value))
            reference_arguments[argument] = name
    return inputs, reference_arguments
