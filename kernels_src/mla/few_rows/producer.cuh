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
            const TileChunks chunks(p, work, pages, chunk_log2, tile);
            wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
            chunks.for_each(p, pages, [&](const Chunk& chunk) {
                const uint32_t full = shared_address(&shared.full[kv_state.index]);
                if (chunk.offset == 0) mbarrier_arrive_expect_bytes(full, boxes * chunks.box_bytes());
#pragma unroll
                for (int i = 0; i < (BOXES + PRODUCER_WARPS - 1) / PRODUCER_WARPS; ++i) {
                    const int box = warp + i * PRODUCER_WARPS;
                    const uint32_t target = shared_address(shared.stages[kv_state.index]) + box * BOX_BYTES;
                    if (i < boxes) chunk.load_box(&p.kv_map, box, target, full, policy);
                }
            });
            __syncwarp();
            kv_state.advance();
        }
    }
}

}  // namespace paged_mla_decode
