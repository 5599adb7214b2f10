"""The times of each decode kernel to start and for a tile, as the cost model counts them, and their origin."""

from __future__ import annotations

from typing import NamedTuple


class Calibration(NamedTuple):
    """The measurement that constants were fitted to.

    ``file`` is in the repository, with its SHA-256. ``launches`` were fitted; of ``held_back`` others, the share
    ``within`` is predicted within 15%.
    """

    device: str
    date: str
    file: str
    sha256: str
    launches: int
    held_back: int
    within: float

    def __str__(self) -> str:
        return (
            f"{self.launches} launches on {self.device}, {self.date} ({self.file}, SHA-256 {self.sha256[:12]}); "
            f"of {self.held_back} others {self.within:.1%} are predicted within 15%"
        )


class KernelCost(NamedTuple):
    """Microseconds of a kernel for KV of ``item_bytes``, with ``resident`` CTAs on each multiprocessor.

    ``q_item_bytes``: the kernel is only for queries of this size; 0: for any queries. ``segments``: the kernel gives
    the bits of prefill.
    ``start_us`` is from the launch to the first tile and from the last tile to the end; ``tile_us`` the time of each
    CTA for 64 tokens of a KV head, with its share of the multiprocessor's bandwidth; ``output_tile_us`` what each
    output tile of a CTA takes besides (queries, the last tile, rows of output). A tile takes at least ``least_share``
    of ``tile_us`` where few CTAs run, for its products and conversions. ``shared_tile_us`` is the time of a tile whose
    keys several row tiles read, which find them in L2 but for one of them (0: ``tile_us``); where they drift apart,
    every further one reads ``reread_share`` of them again.
    """

    item_bytes: int
    head_dim: int
    rows: int
    resident: int
    start_us: float
    tile_us: float
    output_tile_us: float
    q_item_bytes: int = 0
    segments: bool = False
    least_share: float = 0.0
    shared_tile_us: float = 0.0
    reread_share: float = 0.0


H200_CALIBRATION = Calibration(
    device="NVIDIA H200",
    date="2026-11-24",
    file="benchmarks/results/launch_choice_h200.json",
    sha256="cea04eb8c01a0e72f1e37144c045a8db49d1e05c8f2ea4c2a48374a736429fbd",
    launches=1436,
    held_back=1387,
    within=0.9128,
)

# Those of 16-bit queries over e4m3 were fitted to benchmarks/results/launch_drafts_h200.json as well.
# Item bytes, head_dim, rows, CTAs on a multiprocessor: start, tile and output tile; bytes of a query where they matter.
H200_KERNELS = (
    KernelCost(2, 64, 8, 1, 2.19, 0.277, 2.79),
    KernelCost(2, 64, 8, 2, 2.27, 0.289, 3.43),
    KernelCost(2, 64, 16, 1, 2.42, 0.432, 3.8),
    KernelCost(2, 64, 16, 2, 3.6, 0.374, 4.49),
    KernelCost(2, 64, 64, 1, 3.52, 0.469, 2.51, least_share=0.41),
    KernelCost(2, 128, 8, 1, 2.16, 0.56, 2.64),
    KernelCost(2, 128, 8, 2, 3.14, 0.588, 2.73),
    KernelCost(2, 128, 16, 1, 2.64, 0.772, 4.12),
    KernelCost(2, 128, 16, 2, 4.25, 0.801, 4.16),
    KernelCost(2, 128, 64, 1, 3.16, 0.89, 2.86, least_share=0.41),
    KernelCost(1, 128, 8, 1, 2.01, 0.429, 2.62, least_share=0.714, shared_tile_us=0.391, reread_share=0.216),
    KernelCost(1, 128, 8, 2, 2.2, 0.522, 3.05, least_share=0.714, shared_tile_us=0.499, reread_share=0.216),
    KernelCost(1, 128, 16, 1, 2.56, 0.524, 4.78, least_share=0.714, shared_tile_us=0.529, reread_share=0.216),
    KernelCost(1, 128, 16, 2, 2.43, 0.776, 4.92, least_share=0.714, shared_tile_us=0.721, reread_share=0.216),
    KernelCost(1, 128, 64, 1, 1.82, 0.843, 5.51, 2, least_share=0.714),
    # By single requests: benchmarks/results/launch_alone_h200.json.
    KernelCost(1, 64, 8, 1, 2.28, 0.32, 2.35, least_share=0.692, shared_tile_us=0.236),
    KernelCost(1, 64, 8, 2, 2.76, 0.452, 2.17, least_share=0.32),
    KernelCost(1, 64, 16, 1, 2.08, 0.36, 5.12, least_share=0.704),
    KernelCost(1, 64, 16, 2, 3.41, 0.453, 4.5, least_share=0.676),
    KernelCost(1, 64, 64, 1, 1.87, 0.372, 5.51, 2, least_share=0.854),
    KernelCost(1, 256, 8, 1, 4.08, 0.9, 2.76, least_share=0.636),
    KernelCost(1, 256, 32, 1, 5.82, 1.33, 4.26, least_share=0.775),
    # Not in the calibration: in proportion to the kernels above, by earlier measurements.
    KernelCost(2, 64, 128, 1, 3.52, 0.73, 2.51, least_share=0.41),
    KernelCost(2, 128, 128, 1, 3.16, 1.03, 2.86, least_share=0.41),
    KernelCost(1, 128, 64, 1, 1.87, 0.517, 5.51, 1, least_share=0.41),
    KernelCost(1, 128, 128, 1, 1.87, 0.871, 5.51, 1, least_share=0.41),
    KernelCost(1, 64, 64, 1, 1.87, 0.304, 5.51, 1, least_share=0.41),
    KernelCost(1, 64, 128, 1, 1.87, 0.49, 5.51, 1, least_share=0.41),
    KernelCost(2, 256, 8, 1, 2, 0.9, 2.5),
    KernelCost(2, 256, 32, 1, 2.5, 1.5, 4),
    KernelCost(2, 64, 8, 1, 4.3, 0.55, 2.5, segments=True),
    KernelCost(2, 64, 8, 2, 5.3, 1.03, 2.5, segments=True),
    KernelCost(2, 64, 16, 1, 4.3, 0.6, 2.5, segments=True),
    KernelCost(2, 64, 16, 2, 5.3, 1.05, 2.5, segments=True),
    KernelCost(2, 64, 64, 1, 5.3, 0.85, 2.5, segments=True, least_share=0.41),
    KernelCost(2, 64, 64, 2, 6.3, 1.0, 2.5, segments=True, least_share=0.41),
    KernelCost(2, 128, 8, 1, 4.3, 1.03, 2.5, segments=True),
    KernelCost(2, 128, 16, 1, 4.3, 1.05, 2.5, segments=True),
    KernelCost(2, 128, 64, 1, 5.3, 1.07, 2.5, segments=True, least_share=0.41),
    KernelCost(2, 128, 128, 1, 5.3, 1.45, 2.5, segments=True, least_share=0.41),
    # Not fitted: by the times of each grid in one run on an H200, 1,024 to 131,072 keys.
    KernelCost(1, 64, 8, 1, 4.3, 0.5, 2.5, segments=True),
    KernelCost(1, 64, 8, 2, 6.3, 0.62, 2.5, segments=True),
    KernelCost(1, 64, 8, 3, 6.8, 0.88, 2.5, segments=True),
    KernelCost(1, 64, 16, 1, 4.3, 0.65, 2.5, segments=True),
    KernelCost(1, 64, 16, 2, 6.3, 0.83, 2.5, segments=True),
    KernelCost(1, 64, 64, 1, 5.3, 0.93, 2.5, segments=True, least_share=0.41),
    KernelCost(1, 128, 8, 1, 4.3, 0.64, 2.5, segments=True),
    KernelCost(1, 128, 8, 2, 6.0, 1.02, 2.5, segments=True),
    KernelCost(1, 128, 16, 1, 4.3, 0.85, 2.5, segments=True),
    KernelCost(1, 128, 16, 2, 5.3, 1.15, 2.5, segments=True),
    KernelCost(1, 128, 64, 1, 5.3, 1.18, 2.5, segments=True, least_share=0.41),
)
