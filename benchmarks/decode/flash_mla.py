"""FlashMLA as a peer of the MLA decodes: calls of the library that ``flash_mla_build.py`` makes of its sources."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .mla_cases import MlaCase
from .mla_measuring import SCALE, MlaMaker, MlaProblem
from .sparse_mla_measuring import SparseMlaProblem
from .timing import Call

PAGE = 64
METADATA_WORDS = 8
_POINTERS = ("q", "cache", "out", "tables", "lens", "metadata", "splits", "lse", "lse_parts", "out_parts", "stream")
_NUMBERS = ("batch", "q_len", "heads", "width", "latent", "pages", "columns", "parts", "causal")


class _Arguments(ctypes.Structure):
    """``FlashMlaCall`` of ``flash_mla.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("scale", ctypes.c_float),
    )


def load(path: Path | None) -> ctypes.CDLL:
    """The library.

    Raises:
        FileNotFoundError: none was named.
    """
    if path is None:
        raise FileNotFoundError("no library was named with --flashmla")
    library = ctypes.CDLL(str(path))
    library.flash_mla_commit.restype = ctypes.c_char_p
    for name in ("plan", "run", "sparse_plan", "sparse_run"):
        getattr(library, f"flash_mla_{name}").argtypes = [ctypes.POINTER(_Arguments)]
    return library


def commit_of(library: ctypes.CDLL) -> str:
    """The commit of its sources."""
    stated: bytes = library.flash_mla_commit()
    return stated.decode()


def maker(library: ctypes.CDLL) -> MlaMaker:
    """Its dense calls of a problem, one for each page table, planned before."""

    def calls(problem: MlaProblem) -> list[Call]:
        case = problem.case
        if case.kv_dtype != "bf16" or case.q_dtype != "bf16" or case.page != PAGE:
            raise ValueError(f"expected bf16 and pages of {PAGE}, not {case.label} with pages of {case.page}")
        parts = library.flash_mla_parts(_multiprocessors(), case.q_len, case.heads)
        tensors = {"q": problem.q, "cache": problem.cache, "lens": problem.lens}
        functions = (library.flash_mla_plan, library.flash_mla_run)
        return _calls(functions, case, case.heads, parts, tensors, problem.tables)

    return calls


def sparse_maker(library: ctypes.CDLL) -> MlaMaker:
    """Its sparse calls of a problem, one for each layer's lists, planned before, with the padded queries."""

    def calls(problem: MlaProblem) -> list[Call]:
        case = problem.case
        if not isinstance(problem, SparseMlaProblem) or case.kv_dtype != "e4m3":
            raise ValueError(f"expected lists of rows of 656 bytes, not {case.label} of {case.kv_dtype}")
        heads = problem.padded_q.shape[1]
        parts = library.flash_mla_sparse_parts(_multiprocessors(), case.q_len, heads)
        tensors = {"q": problem.padded_q, "cache": problem.cache}
        functions = (library.flash_mla_sparse_plan, library.flash_mla_sparse_run)
        return _calls(functions, case, heads, parts, tensors, problem.tables)

    return calls


def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def _calls(
    functions: tuple[Any, Any],
    case: MlaCase,
    heads: int,
    parts: int,
    tensors: Mapping[str, torch.Tensor],
    tables: list[torch.Tensor],
) -> list[Call]:
    """A call for each of ``tables``, with ``heads``, of which the output has those of the case."""
    plan, run = functions
    rows = case.q_len * heads
    words: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
    made = {
        "out": torch.empty(case.batch, case.q_len, heads, case.latent, device="cuda", dtype=torch.bfloat16),
        "metadata": torch.empty(parts, METADATA_WORDS, **words),
        "splits": torch.empty(case.batch + 1, **words),
        "lse": torch.empty(case.batch, rows, device="cuda"),
        "lse_parts": torch.empty(case.batch + parts, rows, device="cuda"),
        "out_parts": torch.empty(case.batch + parts, rows, case.latent, device="cuda"),
    }
    numbers = {name: getattr(case, name) for name in ("batch", "q_len", "width", "latent")}
    numbers |= {"heads": heads, "pages": len(tensors["cache"]), "columns": tables[0].shape[-1], "parts": parts}

    def call_of(table: torch.Tensor) -> Call:
        pointers = {name: tensor.data_ptr() for name, tensor in (*tensors.items(), *made.items(), ("tables", table))}
        given = _Arguments(**pointers, **numbers, causal=1, scale=SCALE)

        def call(function: Any = run) -> torch.Tensor:
            given.stream = torch.cuda.current_stream().cuda_stream
            if status := function(ctypes.byref(given)):
                raise RuntimeError(f"CUDA error {status}")
            return made["out"][:, :, : case.heads]

        return call

    found = [call_of(table) for table in tables]
    found[0](plan)
    return found
