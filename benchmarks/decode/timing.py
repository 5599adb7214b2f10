"""Clocks: device medians of single calls with L2 cleared, host costs, and the SM clock."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_environment import first_device
from triton.testing import do_bench

WARMUP_MS, REP_MS = 10, 60
HOST_CALLS, HOST_ROUNDS = 40, 7

Call = Callable[[], Any]


def median_us(call: Call, rep_ms: float = REP_MS) -> float:
    """Device time of one call, L2 cleared before each; ``rep_ms`` of device time are spent on it."""
    return 1e3 * do_bench(call, warmup=WARMUP_MS, rep=rep_ms, return_mode="median")


def host_us(call: Call) -> float:
    """Median over rounds of the host time of one call, the device's queue never full."""
    for _ in range(10):
        call()
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


class SmClock:
    """The SM clock in MHz while this is entered, as nvidia-smi tells it once a second."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def __enter__(self) -> SmClock:
        query = ("--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--loop-ms=1000")
        command = ["nvidia-smi", f"--id={first_device()}", *query]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.samples.append(int(line))

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def summary(self, since: int = 0) -> dict[str, float]:
        """Of the samples after the first ``since``; empty without one."""
        taken = self.samples[since:]
        if not taken:
            return {}
        return {"min": min(taken), "median": statistics.median(taken), "max": max(taken), "samples": len(taken)}


def matrix_tflop_per_s(size: int = 8192) -> float:
    """The rate of a bf16 matrix product, random numbers, by torch: the ceiling of the roofline."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_us(lambda: a @ b, 200) / 1e6
