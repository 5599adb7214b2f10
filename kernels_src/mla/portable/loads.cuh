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
        const TileChunks chunks(p, work, pages, chunk_tokens_log2(p), next++);
        chunks.for_each(p, pages, [&](const Chunk& chunk) {
            const uint64_t policy = kv_l2_policy(p);
            const uint32_t full = shared_address(&shared.full[stage.index]);
            if (chunk.offset == 0) mbarrier_arrive_expect_bytes(full, BOXES * chunks.box_bytes());
#pragma unroll 1
            for (int box = 0; box < BOXES; ++box)
                chunk.load_box(&p.kv_map, box, shared_address(shared.kv[stage.index][box]), full, policy);
        });
        __syncwarp();
        stage.advance();
    }
};

}  // namespace paged_mla_decode
