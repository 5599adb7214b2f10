// Queries of a work tile into a stage of the pipeline.
#pragma once
#include "shared_storage.cuh"

namespace paged_mla_decode {

DEVICE void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Row R of a request is head R % heads of its query token R / heads. Each warp copies some of the rows that exist, of
// those in the stage.
DEVICE void copy_queries(const Params& p, const WorkTile& work, uint32_t stage, uint32_t full, int warp) {
    constexpr int OWN = 16 / (PRODUCER_WARPS / STAGES_OF_TILE);
    const int lane = threadIdx.x % 32, row = warp * OWN + lane;
    const int item = query_type(p) == TYPE_E4M3 ? 1 : 2;
    if (lane == 0) mbarrier_arrive_expect_bytes(full, min(max(work.rows - warp * OWN, 0), OWN) * COLUMNS * item);
    __syncwarp();
    if (lane < OWN && row < work.rows)
        bulk_copy(
            stage + (ROWS == 16 ? row : row % 16) * QUERY_PITCH,
            static_cast<const char*>(p.q) + row_offset(work, row, p.heads, p.q_token_stride, p.q_head_stride) * item,
            COLUMNS * item, full);
    __syncwarp();
}

}  // namespace paged_mla_decode
