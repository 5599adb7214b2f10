// Producer warps of the sparse kernel for 16 rows: queries, and the rows that a list names, into the pipeline.
#pragma once
#include "../few_rows/queries.cuh"
#include "lists.cuh"

namespace paged_mla_decode {

constexpr int OWN_ROWS = TILE_TOKENS / PRODUCER_WARPS;  // of a tile, that a warp copies

DEVICE void load(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_PRODUCER_THREAD) / 32, 0), lane = threadIdx.x % 32;
    const int row = warp * OWN_ROWS + lane;
    const uint64_t policy = row_l2_policy(p);
    PipelineState<STAGES> kv_state;
    const auto begin = [&](const WorkTile& work) {
        wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
        copy_queries(p, work, shared_address(shared.stages[kv_state.index]),
                     shared_address(&shared.full[kv_state.index]), warp);
        kv_state.advance();
    };
    const auto copy = [&](int head, int count, uint32_t last) {
        const int own = min(max(count - warp * OWN_ROWS, 0), OWN_ROWS);
        const uint32_t full = shared_address(&shared.full[kv_state.index]);
        wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
        if (lane == 0) {
            if (warp == 0) shared.tile[kv_state.index] = count | last;
            mbarrier_arrive_expect_bytes(full, own * ROW_BYTES);
        }
        __syncwarp();
        const void* const source =
            row_address(p, shared.slots[warp][(head + row) % SLOT_RING]);  // any, for lanes without one
        copy_rows<OWN_ROWS>(source, own, shared_address(shared.stages[kv_state.index]) + warp * OWN_ROWS * KEY_PITCH,
                            full, policy);
        __syncwarp();
        kv_state.advance();
    };
    walk_lists(p, range, shared.slots[warp], warp == 0, begin, copy);
}

}  // namespace paged_mla_decode
