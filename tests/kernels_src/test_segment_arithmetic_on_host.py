"""The arithmetic that prefill and decode share under batch_invariant, beside an emulation with exact products."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.testing.standin import cuda_include
from kernels_src.build import SOURCES, write_headers

SOURCE = Path(__file__).parent / "host" / "segments.cpp"
INFINITY = math.inf
Segments = tuple[np.ndarray, np.ndarray, np.ndarray]  # maxima, sums, outputs


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("arithmetic")
    write_headers(folder, LAYOUTS)
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-I{folder}", f"-I{cuda_include('crt/host_defines.h')}", str(SOURCE), "-o", str(folder / "it.so")]
    for name, header in (("SOURCE_PTX", "ptx"), ("SOURCE", "segments")):
        command.append(f'-D{name}="{SOURCES}/common/{header}.cuh"')
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(folder / "it.so"))
    loaded.raised.restype = ctypes.c_float
    return loaded


def random_segments(seed: int, count: int = 9) -> Segments:
    """Maxima are whole numbers, so that factors are powers of two, which any exp2 gives exactly."""
    rng = np.random.default_rng(seed)
    maxima = rng.integers(-6, 7, count).astype(np.float32)
    return maxima, rng.uniform(0.5, 300, count).astype(np.float32), rng.standard_normal(count).astype(np.float32)


def fold(library: ctypes.CDLL, segments: Segments) -> np.ndarray:
    given = [np.ascontiguousarray(part, np.float32).ctypes.data_as(ctypes.c_void_p) for part in segments]
    to = np.empty(3, np.float32)
    library.fold(*given, len(segments[0]), ctypes.c_float(1), to.ctypes.data_as(ctypes.c_void_p))
    return to


def emulated(segments: Segments) -> np.ndarray:
    """From the left, each step rounded as A = fma(segment, its factor, A times its own)."""
    maximum, totals = -np.inf, np.zeros(2, np.float32)
    for top, *parts in zip(*segments, strict=True):
        highest = max(maximum, top)
        earlier, own = (1.0 if x == highest else 2.0 ** float(x - highest) for x in (maximum, top))
        scaled = (totals.astype(np.float64) * earlier).astype(np.float32)
        totals = (np.array(parts, np.longdouble) * own + scaled).astype(np.float32)
        maximum = highest
    return np.array([maximum, *totals], np.float32)


@pytest.mark.parametrize("seed", range(50))
def test_segments_are_folded_from_the_left(library: ctypes.CDLL, seed: int) -> None:
    segments = random_segments(seed)
    np.testing.assert_array_equal(fold(library, segments), emulated(segments))


def test_another_order_would_show(library: ctypes.CDLL) -> None:
    reversed_ones = [tuple(part[::-1] for part in random_segments(seed)) for seed in range(50)]
    assert any((fold(library, one) != emulated(random_segments(i))).any() for i, one in enumerate(reversed_ones))


@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_segment_without_visible_keys_changes_nothing(library: ctypes.CDLL, place: int) -> None:
    segments = random_segments(1)
    more = tuple(np.insert(part, place, empty) for part, empty in zip(segments, (-np.inf, 0, 0), strict=True))
    np.testing.assert_array_equal(fold(library, more), fold(library, segments))


def test_rows_without_visible_keys_stay_empty(library: ctypes.CDLL) -> None:
    empty = np.full(3, -np.inf), np.zeros(3), np.zeros(3)
    assert fold(library, empty).tolist() == [-INFINITY, 0.0, 0.0]


@pytest.mark.parametrize(
    ("maximum", "top", "scale", "expected"),
    [
        (-INFINITY, -3.0, 1.0, -3.0),  # the first visible tile
        (-INFINITY, -INFINITY, 1.0, -INFINITY),
        (2.0, -INFINITY, 1.0, 2.0),
        (2.0, 10.0, 1.0, 2.0),  # by 8
        (2.0, 10.5, 1.0, 10.5),
        (2.0, 10.5, 0.5, 2.0),
        (2.0, -50.0, 1.0, 2.0),
    ],
)
def test_a_maximum_is_raised_where_probabilities_would_exceed_2_to_the_8(
    library: ctypes.CDLL, maximum: float, top: float, scale: float, expected: float
) -> None:
    assert library.raised(ctypes.c_float(maximum), ctypes.c_float(top), ctypes.c_float(scale)) == expected


@pytest.mark.parametrize(
    ("maximum", "total", "sink", "lse_sink", "expected"),
    [
        (3.0, 4.0, None, True, (0.75, 5.0)),
        (-INFINITY, 0.0, None, True, (0.0, -INFINITY)),
        (0.0, 1.0, 0.0, True, (1.5, 1.0)),
        (0.0, 1.0, 0.0, False, (1.5, 0.0)),
        (-INFINITY, 0.0, 0.0, True, (0.0, 0.0)),
    ],
)
def test_rows_are_normalised_with_their_sink(
    library: ctypes.CDLL,
    maximum: float,
    total: float,
    sink: float | None,
    lse_sink: bool,
    expected: tuple[float, float],
) -> None:
    to = np.empty(2, np.float32)
    given = None if sink is None else ctypes.byref(ctypes.c_float(sink))
    statistics = ctypes.c_float(maximum), ctypes.c_float(total)
    library.normalise(*statistics, given, int(lse_sink), to.ctypes.data_as(ctypes.c_void_p))
    assert tuple(to.tolist()) == expected
