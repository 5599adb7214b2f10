"""The choice against medians of triton's do_bench, in us, that were measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from cubin_runtime.kernels.native.decode.candidates import Fit
from cubin_runtime.kernels.native.decode.grids import DecodeShape
from cubin_runtime.kernels.native.decode.select import DecodeSelection, select_decode
from tests.kernels.decode_kernels import HOPPER
from tests.launch.examples import H100

H200 = replace(H100, name="NVIDIA H200")
KV_HEADS = 8


@dataclass(frozen=True)
class Measured:
    """A problem of 8 KV heads, and what kernels took: by their rows and the CTAs on a multiprocessor."""

    dtype: str
    head_dim: int
    rows: tuple[int, int]  # query tokens, query heads per KV head
    batch: int
    keys: int
    us: dict[tuple[int, int], float]
    q_dtype: str = "bf16"

    @property
    def shape(self) -> DecodeShape:
        q_len, group = self.rows
        types = {"dtype": self.dtype, "q_dtype": self.q_dtype}
        sizes = {"head_dim": self.head_dim, "group": group, "kv_heads": KV_HEADS, "batch": self.batch}
        return DecodeShape(**types, **sizes, q_len=q_len, max_seq_len=self.keys)

    def __str__(self) -> str:
        return f"{self.q_dtype}-{self.dtype}-{self.head_dim}-{self.rows[0]}x{self.rows[1]}-{self.batch}x{self.keys}"


MEASURED = (
    Measured("bf16", 128, (1, 8), 1, 1024, {(8, 1): 12.8, (64, 1): 20.3}),
    Measured("bf16", 128, (1, 8), 1, 16384, {(8, 1): 31.1, (64, 1): 37.2}),
    Measured("bf16", 128, (1, 8), 8, 4096, {(8, 1): 46.8, (8, 2): 46.8, (64, 1): 49}),
    Measured("bf16", 128, (1, 8), 64, 8192, {(8, 1): 511, (8, 2): 507, (64, 1): 519}),
    Measured("bf16", 128, (1, 8), 128, 2048, {(8, 2): 268, (64, 1): 275}),
    Measured("bf16", 128, (2, 8), 8, 16384, {(16, 1): 149.6, (16, 2): 147.5}),
    Measured("bf16", 128, (2, 8), 32, 16384, {(16, 1): 530, (16, 2): 509}),
    Measured("bf16", 128, (8, 8), 8, 16384, {(64, 1): 152}),
    Measured("bf16", 128, (8, 8), 32, 16384, {(64, 1): 522}),
    Measured("bf16", 128, (32, 4), 8, 16384, {(128, 1): 162.3}),
    Measured("bf16", 128, (64, 4), 8, 16384, {(128, 1): 229.9}),
    Measured("bf16", 128, (16, 4), 64, 16384, {(64, 1): 1020.7}),
    Measured("bf16", 128, (32, 4), 64, 16384, {(64, 1): 1459.8, (128, 1): 1089.9}),
    Measured("bf16", 128, (64, 4), 64, 16384, {(64, 1): 2847.6, (128, 1): 2145.9}),
    Measured("bf16", 64, (1, 8), 8, 16384, {(8, 1): 81.9, (8, 2): 82.1}),
    Measured("bf16", 64, (1, 8), 16, 16384, {(8, 1): 143.8, (8, 2): 147.8}),
    Measured("bf16", 64, (1, 8), 32, 16384, {(8, 1): 273, (8, 2): 273}),
    Measured("bf16", 64, (1, 8), 64, 16384, {(8, 1): 523, (8, 2): 524}),
    Measured("bf16", 64, (2, 8), 8, 16384, {(16, 2): 84.4, (64, 1): 90}),
    Measured("bf16", 64, (2, 8), 32, 16384, {(16, 2): 277, (64, 1): 290}),
    Measured("bf16", 64, (2, 8), 64, 16384, {(16, 2): 527}),
    Measured("bf16", 64, (8, 8), 8, 16384, {(64, 1): 93.5}),
    Measured("bf16", 64, (8, 8), 32, 16384, {(64, 1): 293}),
    Measured("bf16", 64, (32, 4), 64, 16384, {(128, 1): 751.1}),
    Measured("bf16", 64, (48, 4), 64, 16384, {(128, 1): 1508.0}),
    Measured("bf16", 64, (64, 4), 64, 16384, {(128, 1): 1579.8}),
    Measured("e4m3", 128, (1, 8), 1, 8192, {(8, 1): 17.6, (8, 2): 19.9}),
    Measured("e4m3", 128, (1, 8), 32, 4096, {(8, 1): 81.1, (8, 2): 81.2}),
    Measured("e4m3", 128, (1, 8), 128, 2048, {(8, 1): 151.7, (8, 2): 152.5}),
    Measured("e4m3", 128, (1, 8), 64, 16384, {(8, 1): 529, (8, 2): 529}),
    Measured("e4m3", 128, (1, 12), 32, 4096, {(16, 2): 83.1}),
    Measured("e4m3", 128, (1, 12), 128, 2048, {(16, 2): 154.8}),
    Measured("e4m3", 128, (1, 12), 64, 16384, {(16, 2): 529}),
    Measured("e4m3", 128, (4, 12), 32, 16384, {(64, 1): 368}),
    Measured("e4m3", 64, (8, 8), 64, 16384, {(64, 1): 434}),
    Measured("e4m3", 128, (4, 12), 16, 16384, {(64, 1): 157}, "e4m3"),
    Measured("e4m3", 128, (4, 12), 40, 16384, {(64, 1): 370}, "e4m3"),
    Measured("e4m3", 128, (4, 12), 64, 16384, {(64, 1): 615}, "e4m3"),
    Measured("e4m3", 128, (8, 12), 16, 16384, {(128, 1): 246}, "e4m3"),
    Measured("e4m3", 128, (8, 12), 64, 16384, {(128, 1): 998}, "e4m3"),
    Measured("e4m3", 64, (8, 8), 8, 16384, {(64, 1): 62.9}, "e4m3"),
    Measured("e4m3", 64, (8, 8), 64, 16384, {(64, 1): 361}, "e4m3"),
    Measured("e4m3", 64, (1, 8), 8, 16384, {(8, 2): 51.6}),
    Measured("e4m3", 64, (1, 8), 64, 16384, {(8, 2): 292}),
)

# What clusters took, and the even cut of all tiles on the same kernel or, where it is faster, another.
CLUSTERS = (
    (Measured("bf16", 128, (1, 8), 1, 64, {}), 8.1, 8.5),
    (Measured("bf16", 128, (1, 8), 1, 1024, {}), 11.3, 12.8),
    (Measured("bf16", 128, (1, 8), 1, 4096, {}), 13.9, 16.4),
    (Measured("bf16", 128, (1, 8), 1, 16384, {}), 27.2, 30.0),
    (Measured("bf16", 128, (1, 8), 1, 32768, {}), 44.7, 45.9),
    (Measured("bf16", 128, (1, 8), 1, 65536, {}), 78.8, 79.5),
    (Measured("bf16", 128, (1, 8), 2, 4096, {}), 18.6, 20.1),
    (Measured("bf16", 128, (1, 8), 4, 512, {}), 12.4, 14.3),
    (Measured("bf16", 128, (1, 8), 4, 2048, {}), 19.1, 20.6),
    (Measured("bf16", 128, (1, 8), 8, 1024, {}), 18.4, 20.2),
    (Measured("bf16", 128, (1, 8), 16, 512, {}), 17.6, 18.0),
    (Measured("bf16", 128, (4, 8), 1, 4096, {}), 17.0, 19.6),
    (Measured("bf16", 128, (8, 8), 1, 4096, {}), 16.9, 21.9),
    (Measured("bf16", 128, (8, 8), 1, 16384, {}), 30.2, 47.2),
    (Measured("bf16", 128, (8, 8), 1, 65536, {}), 82.5, 98.4),
    (Measured("bf16", 128, (16, 8), 1, 4096, {}), 22.2, 53.4),
    (Measured("bf16", 128, (16, 8), 1, 16384, {}), 45.8, 41.5),
    (Measured("bf16", 64, (1, 8), 1, 4096, {}), 11.9, 14.1),
    (Measured("bf16", 64, (1, 8), 1, 16384, {}), 19.1, 21.4),
    (Measured("bf16", 256, (1, 8), 1, 4096, {}), 19.7, 24.9),
    (Measured("bf16", 512, (1, 4), 1, 4096, {}), 29.5, 36.0),
    (Measured("e4m3", 128, (1, 8), 1, 8192, {}), 15.2, 16.9),
    (Measured("e4m3", 128, (1, 8), 1, 32768, {}), 29.6, 30.7),
    (Measured("e4m3", 128, (4, 12), 1, 16384, {}), 34.6, 42.7),
    (Measured("e4m3", 128, (8, 12), 1, 4096, {}), 25.4, 31.0),
    (Measured("e4m3", 128, (8, 12), 1, 16384, {}), 55.5, 46.6),
    (Measured("e4m3", 64, (8, 8), 1, 4096, {}), 15.5, 31.5),
)


# What is chosen there was not timed when the others were.
UNTIMED = ("bf16-bf16-128-2x8-8x16384", "bf16-bf16-64-2x8-8x16384", "bf16-e4m3-64-1x8-8x16384")


def selected(measured: Measured) -> DecodeSelection:
    (made,) = select_decode(HOPPER, measured.shape, H200)
    return made


def named(fit: Fit) -> tuple[int, int]:
    return int(fit.kernel.traits["rows"]), fit.grid.resident


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_what_is_chosen_takes_little_more_than_the_fastest_that_was_measured(measured: Measured) -> None:
    made = selected(measured)
    taken = next(c.fit for c in made.candidates if c.fit and c.kernel == made.kernel)
    if str(measured) in UNTIMED:
        assert named(taken) not in measured.us
    else:
        assert measured.us[named(taken)] <= 1.03 * min(measured.us.values())


@pytest.mark.parametrize(("measured", "cluster_us", "even_us"), CLUSTERS, ids=str)
def test_clusters_are_chosen_where_little_is_lost(measured: Measured, cluster_us: float, even_us: float) -> None:
    taken = cluster_us if selected(measured).cluster_size else even_us
    assert taken <= 1.2 * min(cluster_us, even_us)
