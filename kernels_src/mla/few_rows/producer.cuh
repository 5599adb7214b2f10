// Producer warps of the kernel for few rows: queries and KV tiles of pages into the pipeline.
#pragma once
#include "../pages.cuh"
#include "queries.cuh"

namespace paged_mla_decode {

// Each of the four warps loads its boxes of every KV tile.
DEVICE void load(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_PRODUCER_THREAD) / 32, 0);
    const int chunk_log2 = chunk_tokens_log2(p);
    const uint64_t policy = kv_l2_policy(p);
    const int boxes = (BOXES - warp + PRODUCER_WARPS - 1) / PRODUCER_WARPS;
    PipelineState<STAGES> kv_state;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
        copy_queries(p, work, shared_address(shared.stages[kv_state.index]),
                     shared_address(&shared.full[kv_state.index]), warp);
        kv_state.advance();
        PageWindow pages;
        const int last = work.first + work.key_tiles();
#pragma unroll 1
        for (int tile = work.first; tile < last; ++tile) {
            const TilePages at(p, work, pages, chunk_log2, tile);
            wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
            if (elect_one()) {
                const uint32_t full = shared_address(&shared.full[kv_state.index]);
                mbarrier_arrive_expect_bytes(full, boxes * at.chunks << (chunk_log2 + ROW_BYTES_LOG2));
#pragma unroll
                for (int i = 0; i < (BOXES + PRODUCER_WARPS - 1) / PRODUCER_WARPS; ++i)
                    if (i < boxes)
                        tma_load_box(
                            &p.kv_map, at, chunk_log2, warp + i * PRODUCER_WARPS,
                            shared_address(shared.stages[kv_state.index]) + (warp + i * PRODUCER_WARPS) * BOX_BYTES,
                            full, policy);
            }
            __syncwarp();
            kv_state.advance();
        }
    }
}

}  // namespace paged_mla_decode
