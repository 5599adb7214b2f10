"""The softmax of a segment in prefill and in decode of few rows, compiled for the host: the same bits."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.testing.standin import cuda_include
from kernels_src.build import SOURCES, write_headers
from tests.kernels_src.host_scheduler import DECODE_OPTIONS, SEGMENTS_OPTIONS

SOURCE = Path(__file__).parent / "host" / "segment_softmax.cpp"
ROWS, KEYS = 16, CONSTANTS.segment_tile_tokens
Softmax = Callable[[np.ndarray, float], list[np.ndarray]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("softmax")
    write_headers(folder, LAYOUTS)
    options = {**DECODE_OPTIONS, **SEGMENTS_OPTIONS, "ROWS": ROWS, "USE_TMA": 1, "STAGES": 4}
    headers = {"SOURCE_PTX": "common/ptx", "SOURCE_WGMMA": "common/wgmma", "SOURCE": "fmha/decode/consumer_segments"}
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-I{folder}", f"-I{cuda_include('crt/host_defines.h')}", str(SOURCE), "-o", str(folder / "it.so")]
    command += [f'-D{name}="{SOURCES}/{header}.cuh"' for name, header in headers.items()]
    command += [f"-D{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "it.so"))


def softmax(run: Callable[..., None], scores: np.ndarray, scale: float) -> list[np.ndarray]:
    """Bits of probabilities, factors and statistics of rows' scores ``[tiles, rows, keys]``."""
    tiles = len(scores)
    results = [scores.copy(), np.empty((tiles, ROWS), np.float32), np.empty((ROWS, 2), np.float32)]
    probabilities, factors, statistics = (part.ctypes.data_as(ctypes.c_void_p) for part in results)
    run(probabilities, tiles, ctypes.c_float(scale), factors, statistics)
    return [part.view(np.uint32) for part in results]


def random_scores(seed: int) -> np.ndarray:
    """Of a causal prompt's last tiles or a window's, with rows that see nothing in some or all of them."""
    rng = np.random.default_rng(seed)
    tiles = int(rng.integers(1, 5))
    scores = rng.standard_normal((tiles, ROWS, KEYS)) * rng.choice([0.1, 3.0, 200.0])
    scores += np.arange(tiles)[:, None, None] * rng.choice([0.0, 20.0])  # maxima that rise
    places = np.arange(tiles * KEYS).reshape(tiles, 1, KEYS)
    begin, end = rng.integers(-KEYS, tiles * KEYS, (2, 1, ROWS, 1))
    scores[np.broadcast_to((places < begin) | (places >= end), scores.shape)] = -np.inf
    return scores.astype(np.float32)


@pytest.mark.parametrize("seed", range(60))
def test_prefill_and_decode_give_the_same_bits(library: ctypes.CDLL, seed: int) -> None:
    scores, scale = random_scores(seed), float(np.float32([0.125, 0.0884, 1.0][seed % 3] * 1.4426950408889634))
    for prefill, decode in zip(
        softmax(library.of_prefill, scores, scale), softmax(library.of_decode, scores, scale), strict=True
    ):
        np.testing.assert_array_equal(prefill, decode)


@pytest.mark.parametrize("seed", range(10))
def test_tiles_without_visible_keys_change_nothing(library: ctypes.CDLL, seed: int) -> None:
    scores = random_scores(seed)
    unseen = np.full((1, ROWS, KEYS), -np.inf, np.float32)
    wanted = softmax(library.of_prefill, scores, 0.2)[2]
    for more in ((unseen, scores), (scores, unseen)):
        np.testing.assert_array_equal(softmax(library.of_decode, np.concatenate(more), 0.2)[2], wanted)


def test_another_order_of_keys_would_show(library: ctypes.CDLL) -> None:
    scores = random_scores(0)
    wanted, other = (softmax(library.of_prefill, part, 0.2)[2] for part in (scores, scores[..., ::-1].copy()))
    assert (wanted != other).any()
