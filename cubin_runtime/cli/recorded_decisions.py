"""Writing decisions as JSON with the keys of the recorded vectors, for one case or for a file of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import UsageError
from ..kernels.native.reduction.plan import OperationLaunch
from ..kernels.trtllm_gen.decision import Decision, decide
from ..kernels.trtllm_gen.errors import ARGUMENT, KernelMissing, PlanRefused, WorkspaceRefused
from ..kernels.trtllm_gen.kernel_finder import KernelFinder
from ..kernels.trtllm_gen.parameter_values import DESCRIPTORS
from ..kernels.trtllm_gen.params import KERNEL_PARAMS
from ..kernels.trtllm_gen.traits import Policy, SparseType
from ..launch.plan import LARGEST_PORTABLE_CLUSTER
from ..launch.structs import TENSOR_MAP_BYTES
from ..launch.tensormap import DTYPES, FILLS, INTERLEAVES, L2_PROMOTIONS, SWIZZLES, TensorMapSpec
from .recorded_cases import CaseError, case_in, occupancy_of, problem_of

Json = dict[str, Any]
# Each descriptor in `params_hex` is 128 copies of one byte.
MARKERS: Mapping[str, int] = {name: 0xC1 + place for place, name in enumerate(DESCRIPTORS)}
_encode = json.JSONEncoder(separators=(",", ":")).encode
_MARKED = {name: bytes((marker,)) * TENSOR_MAP_BYTES for name, marker in MARKERS.items()}


def decision_of_case(case: Mapping[str, Any], kernels: KernelFinder, policy: Policy) -> Decision:
    """The decision for one case; errors as ``problem_of`` and ``decide``."""
    invariant = case.get("batch_invariant", False)
    return decide(problem_of(case), kernels, occupancy_of(case), policy, batch_invariant=invariant)


def record_of_case(case: Mapping[str, Any], kernels: KernelFinder, policy: Policy) -> Json:
    """The record of the decision for one case; an error has ``ok`` false and an ``error_kind``.

    Raises:
        CaseError: the case itself does not read.
    """
    try:
        decision = decision_of_case(case, kernels, policy)
    except CaseError:
        raise
    except (UsageError, WorkspaceRefused) as refused:
        return refusal_record(refused)
    return decision_record(decision, case.get("stream"))


def decide_lines(lines: Iterable[bytes], kernels: KernelFinder, *, both: bool, where: str) -> Iterator[str]:
    """One line of JSON per case, by the policy ``reference``; ``both`` adds that of ``best`` under its name.

    Raises:
        UsageError: a line holds no case; the message names it by number.
    """
    for number, line in enumerate(lines, 1):
        case = case_in(line, f"{where}:{number}")
        try:
            decision: Json = {"id": case.get("id"), **record_of_case(case, kernels, Policy.REFERENCE)}
            if both:
                decision["best"] = record_of_case(case, kernels, Policy.BEST)
        except UsageError as error:
            raise UsageError(f"{where}:{number}: {error}") from error
        yield _encode(decision)


def refusal_record(refused: UsageError | WorkspaceRefused) -> Json:
    """The record of an error; sizes and types that no launch can have count as argument checks."""
    key = None
    if isinstance(refused, KernelMissing):
        names = _KEY_NAMES.items()
        key = {name: int(getattr(refused.key, field)) for field, name in names}
    return {
        "ok": False,
        "error": str(refused),
        "error_kind": refused.kind if isinstance(refused, (PlanRefused, WorkspaceRefused)) else ARGUMENT,
        "error_select_params": key,
    }


def decision_record(decision: Decision, stream: object = None) -> Json:
    """The record of a decision."""
    selection, attributes = decision.selection, decision.attributes
    clusters = [(decision.meta, selection.geometry.cluster_x)]
    if selection.asked is not None and selection.left_cluster:
        clusters = [(selection.asked.meta, selection.asked.cluster_x), *clusters]
    built = {name: mark for name, mark in _MARKED.items() if decision.values[name] is not None}
    return {
        "ok": True,
        "error": None,
        "error_kind": None,
        "occupancy_calls": []
        if selection.asked is None
        else [
            {
                "kernel": selection.asked.meta.symbol,
                "clusterDimX": selection.asked.cluster_x,
                "grid": list(selection.asked.grid),
                "returned": selection.asked.active_clusters,
            }
        ],
        "kernel": decision.meta.symbol,
        "grid": list(decision.grid),
        "block": list(decision.block),
        "smem": decision.meta.shared_bytes,
        "stream": stream,
        "attrs": {
            "CLUSTER_DIMENSION": {"id": 4, "value": list(attributes.cluster or (1, 1, 1))},
            "CLUSTER_SCHEDULING_POLICY_PREFERENCE": {"id": 5, "value": [attributes.scheduling_policy]},
            "PROGRAMMATIC_STREAM_SERIALIZATION": {
                "id": 6,
                "value": [int(attributes.programmatic_serialization)],
            },
        },
        "nonportable_cluster_set_for": [m.symbol for m, size in clusters if size > LARGEST_PORTABLE_CLUSTER],
        "tma": {name: _spec(decision.values[name]) for name in MARKERS},
        "params": _params(decision.values),
        "params_hex": KERNEL_PARAMS.pack({**decision.values, **dict.fromkeys(DESCRIPTORS), **built}).hex(),
        "reduction": _reduction(decision),
        "lse": _lse(decision.lse),
    }


# Fields of a selection key -> the records' names.
_KEY_NAMES: Mapping[str, str] = {
    "layout": "qkvLayout",
    "mask": "maskType",
    "kernel_type": "kernelType",
    "scheduler": "tileScheduler",
    "multi_ctas": "multiCtasKvMode",
    "head_dim_per_cta_v": "headDimPerCtaV",
    "head_dim_qk": "headDimQk",
    "head_dim_v": "headDimV",
    "tile_q": "tileSizeQ",
    "tile_kv": "tileSizeKv",
    "tokens_per_page": "numTokensPerPage",
    "dynamic_page": "dynamicNumTokensPerPage",
    "reuses_smem_k_for_v": "reuseSmemKForV",
    "two_cta": "uses2CtaMma",
    "sparse": "sparseMlaType",
    "skips_softmax": "skipsSoftmax",
}


def _spec(spec: object) -> Json | None:
    if not isinstance(spec, TensorMapSpec):
        return None
    return {
        "dataType": DTYPES[spec.dtype].code,
        "rank": len(spec.dims),
        "address": hex(spec.address),
        "globalDim": list(spec.dims),
        "globalStrides": list(spec.strides),
        "boxDim": list(spec.box),
        "elementStrides": list(spec.element_strides),
        "interleave": INTERLEAVES[spec.interleave],
        "swizzle": SWIZZLES[spec.swizzle].code,
        "l2Promotion": L2_PROMOTIONS[spec.l2_promotion],
        "oobFill": FILLS[spec.fill],
    }


def _params(values: Mapping[str, object]) -> Json:
    return {name: values[name] if show is None else show(values[name]) for name, show in _SHOWN}


def _nine_digits(value: Any) -> object:
    text = f"{value:.9g}"
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _address(value: Any) -> str | None:
    return f"{value:#x}" if value else None


def _words(value: Any) -> str:
    text: str = value.to_bytes().hex()
    return text


_FORMS: Mapping[str, Callable[[Any], object]] = {"ptr": _address, "float": _nine_digits, "FastModDiv": _words}
# Every field but the descriptors, in the struct's order, and how it is shown; None: as it is.
_SHOWN = tuple((member.name, _FORMS.get(member.type)) for member in KERNEL_PARAMS.fields if member.name not in MARKERS)


# Names of element types in the reduction's symbol.
_MANGLED = {"fp16": "6__half", "bf16": "13__nv_bfloat16", "e4m3": "13__nv_fp8_e4m3"}


def _reduction(decision: Decision) -> Json | None:
    launch, problem, meta = decision.reduction, decision.problem, decision.meta
    if launch is None:
        return None
    values, partial, out = launch.values, _MANGLED[launch.traits["dtype_partial"]], _MANGLED[problem.dtype_o]
    types = partial + ("S2_" if partial == out else out)
    template = f"Li{values['tile_q']}ELi{values['head_dim']}ELb{int(problem.dtype_q == 'e4m3')}E{types}"
    return {
        "mangled_kernel": f"_ZN12tensorrt_llm7kernels19fmhaReductionKernelI{template}EEv12KernelParamsbbbiiii",
        "grid": list(launch.grid),
        "block": list(launch.block),
        "smem": 0,
        "pdl": int(launch.pdl),
        "params_same_as_main": True,
        "isTokenSparse": int(problem.sparse != SparseType.NONE),
        "groupsTokensHeadsQ": int(meta.groups_tokens_heads_q),
        "supportsVarSparseMlaTopKLens": int(problem.sparse == SparseType.DYNAMIC),
        "numCtasForReduction": values["ctas_per_tile"],
        "numCtasForAllHeads": values["heads_q"] // values["heads_per_cta"],
        "headDimV": values["head_dim_v"],
        "numHeadDimCtasV": values["value_ctas"],
    }


def _lse(launch: OperationLaunch | None) -> Json | None:
    if launch is None:
        return None
    values = launch.values
    return {
        "grid": list(launch.grid),
        "block": list(launch.block),
        "pdl": int(launch.pdl),
        "md": hex(values["statistics"]),
        "lse": hex(values["lse"]),
        "num_heads_q": values["heads_q"],
        "lse_stride_tokens": values["token_stride"],
        "lse_stride_heads": values["head_stride"],
        "n": values["rows"],
    }
