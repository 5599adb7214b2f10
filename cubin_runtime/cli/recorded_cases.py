"""Reading recorded cases: the lines of a file, and a case's JSON as a ``Problem``."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite, prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from ..errors import MissingError, UsageError
from ..kernels.trtllm_gen.arguments import Device, OutScales, Sage, Scale
from ..kernels.trtllm_gen.call import Call
from ..kernels.trtllm_gen.calls import ContextCall, DecodeCall, RaggedCall, TwoPoolCall
from ..kernels.trtllm_gen.errors import WorkspaceRefused
from ..kernels.trtllm_gen.problem import Problem
from ..kernels.trtllm_gen.select import Occupancy
from ..tensor import TensorView
from . import example_call

if TYPE_CHECKING:
    from ..protocols import DTypeName

MAX_LINE_BYTES = 1 << 20
_STANDARD_INPUT = Path("-")
_INT64 = 1 << 63


class CaseError(UsageError):
    """A part of a case is missing or has the wrong layout, so that nothing can be decided."""


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines that are not blank of a file, or of the standard input for ``-``.

    A file named ``.gz`` or ``.xz`` is decompressed.

    Raises:
        MissingError: the file cannot be read.
        UsageError: it is not a regular file, a line is over 1 MiB, or a packed file is damaged or cut short.
    """
    where = place_of(path)
    try:
        with _opened(path) as opened:
            while line := opened.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise UsageError(f"{where}: a line of more than {MAX_LINE_BYTES} bytes")
                if not line.isspace():
                    yield line
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UsageError(f"{where}: {error}") from error
    except OSError as error:
        raise MissingError(f"{where}: cannot be read: {error.strerror}") from error


def read_case(path: Path) -> dict[str, Any]:
    """The one case in a file, or on the standard input for ``-``.

    Raises:
        MissingError: the file cannot be read.
        UsageError: as ``read_lines`` and ``case_in``, or it is over 1 MiB.
    """
    text = bytearray()
    for line in read_lines(path):
        text += line
        if len(text) > MAX_LINE_BYTES:
            raise UsageError(f"{place_of(path)}: more than {MAX_LINE_BYTES} bytes, expected one case")
    return case_in(text, place_of(path))


def place_of(path: Path) -> str:
    """The name of a file of cases in messages."""
    return "standard input" if path == _STANDARD_INPUT else str(path)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a regular file or of the standard input; a FIFO or a device never blocks."""
    if path == _STANDARD_INPUT:
        if sys.stdin is None:
            raise UsageError(f"{place_of(path)}: is closed, expected a case")
        yield sys.stdin.buffer
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{path}: expected a regular file, or '-' for the standard input")
        opener = _OPENERS.get(path.suffix)
        with open(descriptor, "rb", closefd=False) as file, opener(file) if opener else file as unpacked:
            yield unpacked
    finally:
        os.close(descriptor)


def case_in(text: bytes | bytearray | str, where: str) -> dict[str, Any]:
    """The case in a JSON text, which is a case or a record with a ``case``; other keys are ignored.

    Raises:
        UsageError: the text is no JSON object that holds a case.
    """
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: invalid JSON: {error}") from error
    case = stated.get("case", stated) if isinstance(stated, dict) else None
    if not isinstance(case, dict) or "api" not in case:
        raise UsageError(f"{where}: expected an object with a 'case', or a case with an 'api'")
    return case


def call_of(case: Mapping[str, Any]) -> Call:
    """The call of a record's ``case``.

    Raises:
        CaseError: something is missing or has another layout.
        PlanRefused, UsageError: the arguments are refused.
    """
    with _case_errors(case):
        build = _APIS[case["api"]]
        _check_forms(case, _OF_CASE)
        _check_forms(case["scalars"], _SCALARS)
        return build(case, case["scalars"], {name: _tensor(stated) for name, stated in case["tensors"].items()})


def problem_of(case: Mapping[str, Any]) -> Problem:
    """The problem of a record's ``case``.

    Raises:
        CaseError, PlanRefused, UsageError: as ``call_of``.
        WorkspaceRefused: the workspace is too small.
    """
    call = call_of(case)
    with _case_errors(case):
        scalars = case["scalars"]
        workspace = _tensor(case["tensors"]["workspace_buffer"]).pointer, scalars["workspace_size"]
        problem = call.problem(Device(case["sm"], scalars["sm_count"]), workspace)
        allows_64 = case.get("env_TRTLLM_GEN_ENABLE_TILE_SIZE_KV64", False)
        return replace(problem, allows_tile_kv_64=True) if allows_64 else problem


@contextmanager
def _case_errors(case: Mapping[str, Any]) -> Iterator[None]:
    """Errors of reading a case as ``CaseError``."""
    try:
        yield
    except KeyError as error:
        raise CaseError(f"case {case.get('id')!r}: {error} is missing or unknown") from error
    except (UsageError, WorkspaceRefused):
        raise
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CaseError(f"case {case.get('id')!r}: {type(error).__name__}: {error}") from error


def occupancy_of(case: Mapping[str, Any]) -> Occupancy:
    """The occupancy model that a case names instead of the driver's: ``floor``, ``gpc18`` or ``const:N``.

    Raises:
        CaseError: another word.
    """
    name = "max_active_clusters_model"
    try:
        return example_call.occupancy_of(name, case.get(name, "floor"), case["scalars"]["sm_count"])
    except UsageError as error:
        raise CaseError(str(error)) from error


def _is_int(value: object) -> bool:
    return type(value) is int and -_INT64 <= value < _INT64


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_number(value: object) -> bool:
    return _is_int(value) or (type(value) is float and isfinite(value))


def _is_scale(value: object) -> bool:
    return value is None or _is_number(value)


# The checks of stated values; others are not looked at.
_OF_CASE: Mapping[str, Callable[[object], bool]] = {
    "sm": _is_int,
    "batch_invariant": _is_bool,
    "multi_ctas_kv_enabled": _is_bool,
    "env_TRTLLM_GEN_ENABLE_TILE_SIZE_KV64": _is_bool,
}
_SCALARS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("max_q_len", "max_kv_len", "batch_size", "window_left", "sparse_mla_top_k"), _is_int),
    **dict.fromkeys(("o_sf_vec_size", "o_sf_start_index", "workspace_size", "sm_count"), _is_int),
    **dict.fromkeys(("lse_stride_tokens", "lse_stride_heads"), _is_int),
    **{f"num_elts_per_sage_attn_blk_{part}": _is_int for part in "qkpv"},
    **dict.fromkeys(("is_causal", "uses_shared_paged_kv_idx", "enable_pdl"), _is_bool),
    **dict.fromkeys(("o_sf_scale", "skip_softmax_threshold_scale_factor"), _is_number),
    **dict.fromkeys(("bmm1_scale", "bmm2_scale"), _is_scale),
}


def _check_forms(stated: Mapping[str, Any], forms: Mapping[str, Callable[[object], bool]]) -> None:
    for name, is_form in forms.items():
        if name in stated and not is_form(stated[name]):
            raise CaseError(f"{name}={stated[name]!r}: expected {is_form.__name__.removeprefix('_is_')}")


def _tensor(stated: Mapping[str, Any]) -> TensorView:
    pointer, dtype = int(stated["ptr"], 16), stated["dtype"]
    shape, strides = tuple(stated["shape"]), tuple(stated["strides"])
    if not 0 <= pointer < 1 << 64 or not isinstance(dtype, str):
        raise CaseError(f"tensor {stated!r}: expected an address of 64 bits and the name of a dtype")
    numbers = (0, *shape, *strides)
    whole = set(map(type, numbers)) == {int} and min(numbers) >= -_INT64 and max(numbers) < _INT64
    if len(shape) != len(strides) or not whole or min(shape, default=0) < 0:
        raise CaseError(f"tensor {stated!r}: expected as many strides as sizes, all of them whole numbers")
    return TensorView(pointer, cast("DTypeName", dtype), shape, strides)


def _scale(name: str, scalars: Mapping[str, Any], tensors: Mapping[str, TensorView]) -> Scale:
    value = scalars.get(name)
    if value is not None:
        return Scale(value)
    tensor = tensors.get(name)
    return Scale() if tensor is None else Scale(1.0, tensor.pointer)


Stated = Mapping[str, Any]
_Tensors = Mapping[str, TensorView]


def _of_all(case: Stated, scalars: Stated, tensors: _Tensors) -> dict[str, Any]:
    """The fields of all calls."""
    return {
        "query": tensors["query"],
        "out": tensors["out"],
        "seq_lens": replace(tensors["seq_lens"], shape=(scalars["batch_size"],)),
        "max_q": scalars["max_q_len"],
        "bmm1": _scale("bmm1_scale", scalars, tensors),
        "bmm2": _scale("bmm2_scale", scalars, tensors),
        "cum_seq_lens_q": tensors.get("cum_seq_lens_q"),
        "sinks": tensors.get("attention_sinks"),
        "lse": tensors.get("lse"),
        "window_left": scalars.get("window_left", -1),
        "skip_softmax_factor": scalars.get("skip_softmax_threshold_scale_factor", 0.0),
        "pdl": scalars.get("enable_pdl", False),
        "batch_invariant": case.get("batch_invariant", False) or not case.get("multi_ctas_kv_enabled", True),
    }


def _of_paged(case: Stated, scalars: Stated, tensors: _Tensors) -> dict[str, Any]:
    """The fields of paged calls; the strides of an LSE are among the scalars."""
    fields, lse = _of_all(case, scalars, tensors), tensors.get("lse")
    if lse is not None:
        strides = scalars.get("lse_stride_tokens", 0), scalars.get("lse_stride_heads", 0)
        fields["lse"] = replace(lse, strides=strides)
    return {
        **fields,
        "key": tensors["key_cache"],
        "value": tensors["value_cache"],
        "block_tables": tensors["block_tables"],
        "max_kv": scalars["max_kv_len"],
        "key_scales": tensors.get("key_block_scales"),
        "value_scales": tensors.get("value_block_scales"),
        "shares_index": scalars.get("uses_shared_paged_kv_idx", True),
        "out_scales": OutScales(
            scales=tensors.get("out_scale_factor"),
            scale=scalars.get("o_sf_scale", -1.0),
            block=scalars.get("o_sf_vec_size", -1),
            first_token=scalars.get("o_sf_start_index", 0),
        ),
    }


def _decode(case: Stated, scalars: Stated, tensors: _Tensors) -> Call:
    return DecodeCall(
        **_of_paged(case, scalars, tensors),
        top_k=scalars.get("sparse_mla_top_k", 0),
        top_k_lens=tensors.get("sparse_mla_top_k_lens"),
    )


def _context(case: Stated, scalars: Stated, tensors: _Tensors) -> Call:
    return ContextCall(
        **_of_paged(case, scalars, tensors),
        cum_seq_lens_kv=tensors["cum_seq_lens_kv"],
        causal=scalars.get("is_causal", True),
    )


def _ragged(case: Stated, scalars: Stated, tensors: _Tensors) -> Call:
    return RaggedCall(
        **_of_all(case, scalars, tensors),
        key=tensors["key"],
        value=tensors["value"],
        cum_seq_lens_kv=tensors["cum_seq_lens_kv"],
        max_kv=scalars["max_kv_len"],
        causal=scalars.get("is_causal", True),
        sage=Sage(
            tuple(tensors.get(f"sage_attn_sfs_{part}") for part in "qkpv"),  # type: ignore[arg-type]
            tuple(scalars.get(f"num_elts_per_sage_attn_blk_{part}", 0) for part in "qkpv"),
        ),
        out_scale=scalars.get("o_sf_scale", -1.0),
    )


def _two_pools(case: Stated, scalars: Stated, tensors: _Tensors) -> Call:
    return TwoPoolCall(
        **_of_all(case, scalars, tensors),
        max_kv=prod(tensors["sparse_indices"].shape[-1:]),
        pool=tensors["primary_kv_cache"],
        window_pool=tensors["sliding_window_kv_cache"],
        indices=tensors["sparse_indices"],
        top_k_lens=tensors.get("sparse_mla_top_k_lens"),
    )


_APIS: Mapping[str, Callable[[Stated, Stated, _Tensors], Call]] = {
    "trtllm_paged_attention_decode": _decode,
    "trtllm_paged_attention_context": _context,
    "trtllm_ragged_attention": _ragged,
    "trtllm_paged_attention_decode_sparse_mla_dsv4": _two_pools,
}


_OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
