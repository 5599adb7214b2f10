// KV tiles from the pages to the pipeline, by one warp.
#pragma once
#include "../pages.cuh"
#include "shared_storage.cuh"

namespace paged_mla_decode {

// The loads of a work tile, in the order of its tiles.
struct TileLoads {
    PageWindow pages;
    int next, last;  // tiles
    PipelineState<STAGES> stage;

    DEVICE TileLoads(const WorkTile& work, const PipelineState<STAGES>& first)
        : next(work.first), last(work.first + work.key_tiles()), stage(first) {}

    // Loads the next tile, if there is one, into a stage that nobody reads any more.
    DEVICE void load_next(const Params& p, const WorkTile& work, SharedStorage& shared) {
        if (next >= last) return;
        const int chunk_log2 = chunk_tokens_log2(p);
        const TilePages at(p, work, pages, chunk_log2, next++);
        if (elect_one()) {
            const uint64_t policy = kv_l2_policy(p);
            const uint32_t full = shared_address(&shared.full[stage.index]);
            mbarrier_arrive_expect_bytes(full, BOXES * at.chunks << (chunk_log2 + ROW_BYTES_LOG2));
#pragma unroll 1
            for (int box = 0; box < BOXES; ++box)
                tma_load_box(&p.kv_map, at, chunk_log2, box, shared_address(shared.kv[stage.index][box]), full, policy);
        }
        __syncwarp();
        stage.advance();
    }
};

}  // namespace paged_mla_decode
