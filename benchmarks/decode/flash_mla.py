"""FlashMLA as a peer of the MLA decode: calls of the library that ``flash_mla_build.py`` makes of its sources."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .mla_measuring import SCALE, MlaProblem
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
    for function in (library.flash_mla_plan, library.flash_mla_run):
        function.argtypes = [ctypes.POINTER(_Arguments)]
    return library


def commit_of(library: ctypes.CDLL) -> str:
    """The commit of its sources."""
    stated: bytes = library.flash_mla_commit()
    return stated.decode()


def maker(library: ctypes.CDLL) -> Callable[[MlaProblem], list[Call]]:
    """Its calls of a problem, one for each page table, planned before."""

    def calls(problem: MlaProblem) -> list[Call]:
        case, rows = problem.case, problem.case.q_len * problem.case.heads
        if case.kv_dtype != "bf16" or case.q_dtype != "bf16" or case.page != PAGE:
            raise ValueError(f"expected bf16 and pages of {PAGE}, not {case.label} with pages of {case.page}")
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        parts = library.flash_mla_parts(multiprocessors, case.q_len, case.heads)
        words: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
        made = {
            "out": torch.empty_like(problem.out),
            "metadata": torch.empty(parts, METADATA_WORDS, **words),
            "splits": torch.empty(case.batch + 1, **words),
            "lse": torch.empty(case.batch, rows, device="cuda"),
            "lse_parts": torch.empty(case.batch + parts, rows, device="cuda"),
            "out_parts": torch.empty(case.batch + parts, rows, case.latent, device="cuda"),
        }
        tensors = {"q": problem.q, "cache": problem.cache, "lens": problem.lens, **made}
        numbers = {name: getattr(case, name) for name in ("batch", "q_len", "heads", "width", "latent")}
        numbers |= {"pages": len(problem.cache), "columns": problem.tables[0].shape[1], "parts": parts, "causal": 1}

        def call_of(table: torch.Tensor) -> Call:
            pointers = {name: tensor.data_ptr() for name, tensor in (*tensors.items(), ("tables", table))}
            given = _Arguments(**pointers, **numbers, scale=SCALE)

            def call(function: Any = library.flash_mla_run) -> torch.Tensor:
                given.stream = torch.cuda.current_stream().cuda_stream
                if status := function(ctypes.byref(given)):
                    raise RuntimeError(f"CUDA error {status}")
                return made["out"]

            return call

        found = [call_of(table) for table in problem.tables]
        found[0](library.flash_mla_plan)
        return found

    return calls
