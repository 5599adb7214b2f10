"""What each decode kernel takes to start and for a tile, as the cost model counts it."""

from __future__ import annotations

from typing import NamedTuple


class KernelCost(NamedTuple):
    """Microseconds of a kernel for KV of ``item_bytes``, with ``resident`` CTAs on each multiprocessor.

    ``q_item_bytes``: the kernel is only for queries of this size; 0: for any queries. ``segments``: the kernel gives
    the bits of prefill.
    ``start_us`` is from the launch to the first tile and from the last tile to the end; ``tile_us`` the time of
    each CTA for 64 tokens of a KV head, with its share of the multiprocessor's bandwidth.
    """

    item_bytes: int
    head_dim: int
    rows: int
    resident: int
    start_us: float
    tile_us: float
    q_item_bytes: int = 0
    segments: bool = False


# Item bytes, head_dim, rows, CTAs on a multiprocessor: start and tile; bytes of a query where they matter.
H200_KERNELS = (
    KernelCost(2, 64, 8, 1, 8.6, 0.501),
    KernelCost(2, 64, 8, 2, 10.0, 1.022),
    KernelCost(2, 64, 16, 1, 8.6, 0.7),
    KernelCost(2, 64, 16, 2, 12.4, 1.022),
    KernelCost(2, 64, 64, 1, 11.0, 0.525),
    KernelCost(2, 64, 128, 1, 11.0, 0.73),
    KernelCost(2, 128, 8, 1, 6.6, 1.005),
    KernelCost(2, 128, 8, 2, 10.1, 1.9),
    KernelCost(2, 128, 16, 1, 8.6, 1.04),
    KernelCost(2, 128, 16, 2, 15.6, 1.9),
    KernelCost(2, 128, 64, 1, 13.6, 0.77),
    KernelCost(2, 128, 128, 1, 13.6, 1.0),
    KernelCost(2, 256, 8, 1, 6.6, 0.9),
    KernelCost(2, 256, 32, 1, 6.6, 1.5),
    KernelCost(1, 64, 8, 1, 6.6, 0.34),
    KernelCost(1, 64, 8, 2, 9.7, 0.555),
    KernelCost(1, 64, 16, 1, 8.6, 0.66),
    KernelCost(1, 64, 16, 2, 15.6, 0.565),
    KernelCost(1, 64, 64, 1, 12.6, 0.41, 2),
    KernelCost(1, 64, 64, 1, 12.6, 0.335, 1),
    KernelCost(1, 64, 128, 1, 12.6, 0.54, 1),
    KernelCost(1, 128, 8, 1, 9.0, 0.505),
    KernelCost(1, 128, 8, 2, 10.4, 1.031),
    KernelCost(1, 128, 16, 1, 8.6, 0.88),
    KernelCost(1, 128, 16, 2, 13.6, 1.025),
    KernelCost(1, 128, 64, 1, 12.6, 0.69, 2),
    KernelCost(1, 128, 64, 1, 12.6, 0.57, 1),
    KernelCost(1, 128, 128, 1, 12.6, 0.96, 1),
    KernelCost(1, 256, 8, 1, 6.6, 0.9),
    KernelCost(1, 256, 32, 1, 6.6, 1.5),
    # Those of up to 16 rows were not timed one by one.
    KernelCost(2, 64, 8, 1, 9.0, 0.55, segments=True),
    KernelCost(2, 64, 8, 2, 10.0, 1.03, segments=True),
    KernelCost(2, 64, 16, 1, 9.0, 0.6, segments=True),
    KernelCost(2, 64, 16, 2, 10.0, 1.05, segments=True),
    KernelCost(2, 64, 64, 1, 12.0, 0.85, segments=True),
    KernelCost(2, 64, 64, 2, 13.0, 1.0, segments=True),
    KernelCost(2, 128, 8, 1, 9.0, 1.03, segments=True),
    KernelCost(2, 128, 16, 1, 9.0, 1.05, segments=True),
    KernelCost(2, 128, 64, 1, 13.6, 1.07, segments=True),
    KernelCost(2, 128, 128, 1, 13.6, 1.45, segments=True),
)
