"""What launches of attention were sent, read back from the recording driver."""

from __future__ import annotations

import ctypes
from typing import Any

from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA, PAGED_DECODE_TMA_E4M3
from cubin_runtime.kernels.native.mla.params import PAGED_MLA_DECODE
from cubin_runtime.kernels.native.prefill.params import CONTEXT_ATTENTION, CONTEXT_ATTENTION_E4M3
from cubin_runtime.kernels.native.sparse_mla.params import SPARSE_MLA_DECODE
from cubin_runtime.testing import StandIn


def launches(standin: StandIn) -> list[tuple[str, dict[str, Any]]]:
    """For each launch "decode" or "context", and its parameters by name; MLA decodes and merges are left out."""
    found = []
    others = ("mla", "merge")
    sent = [
        each for each in standin.calls("cuLaunchKernelEx") if not any(name in each.seen["symbol"] for name in others)
    ]
    for launch in sent:
        decode = "paged_decode" in launch.seen["symbol"]
        by_cache = (PAGED_DECODE_TMA, PAGED_DECODE_TMA_E4M3) if decode else (CONTEXT_ATTENTION, CONTEXT_ATTENTION_E4M3)
        layout = by_cache["e4m3" in launch.seen["symbol"]]
        found.append(("decode" if decode else "context", layout.unpack(bytes.fromhex(launch.seen["parameter0"]))))
    return found


def mla_launches(standin: StandIn) -> list[dict[str, Any]]:
    """The parameters of each launch of MLA decode, by name."""
    sent = [launch for launch in standin.calls("cuLaunchKernelEx") if "mla" in launch.seen["symbol"]]
    return [PAGED_MLA_DECODE.unpack(bytes.fromhex(launch.seen["parameter0"])) for launch in sent]


def sparse_mla_launches(standin: StandIn) -> list[dict[str, Any]]:
    """The symbol, the grid and the parameters of each launch of sparse MLA decode, by name."""
    sent = [launch.seen for launch in standin.calls("cuLaunchKernelEx") if "sparse_mla" in launch.seen["symbol"]]
    return [
        {name: seen[name] for name in ("symbol", "grid")} | SPARSE_MLA_DECODE.unpack(bytes.fromhex(seen["parameter0"]))
        for seen in sent
    ]


def has_segments(launch: Any) -> bool:
    """Whether a launch of prefill has a kernel that gives the bits of decodes."""
    return "segments" in launch.seen["symbol"]


def integers(address: int, count: int) -> list[int]:
    """Integers at an address of the host, whose tensor the caller keeps alive."""
    return list((ctypes.c_int32 * count).from_address(address))
