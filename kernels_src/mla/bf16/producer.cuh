// Producer warps of the bf16 kernel: tiles of the cache and queries into shared memory.
#pragma once
#include "shared_storage.cuh"
#include "../pages.cuh"
#include "../query_rows.cuh"

namespace paged_mla_decode {

// Each of four warps loads a quarter of every KV tile as soon as its stage is free, and a quarter of the queries' rows;
// the first warp also loads the rope columns. They publish the work tiles to the consumers. The first work tile's
// queries are loaded before its keys; later ones after the first keys, since their place is freed last.
DEVICE void load(const Params& p, const WorkRange& range, SharedStorage& shared) {
    static_assert(HELPERS / 32 == QUARTERS);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 - CONSUMERS / 32, 0);
    const int chunk_log2 = chunk_tokens_log2(p);
    const uint64_t policy = kv_l2_policy(p);
    uint32_t phase = 0;  // bit b: of the next wait for stage b to be empty; bit STAGES: for the queries' place
    bool begun = false;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        if (threadIdx.x == CONSUMERS) shared.work[phase >> STAGES & 1] = work;
        PageWindow pages;
        // in flight together with the queries
        pages.prefetch(p, paged_kv::page_ids(p, work.request), work.kv_len, work.first * TILE_TOKENS);
        const int last = work.first + work.key_tiles(), filled = min(work.first + STAGES, last);
        const int queries_at = begun ? filled : work.first;
        const bool same_queries = begun && work.splits.index > 0;  // this CTA computed the previous split
        begun = true;
#pragma unroll 1
        for (int tile = work.first;; ++tile) {
            if (tile == queries_at) {
                wait_barrier(shared.q_empty, (phase >> STAGES & 1) ^ 1);
                phase ^= 1u << STAGES;
                // of the same queries only what P overwrote: the rope columns
                copy_query_rows<8>(p, work, shared_address(shared.q[0]), warp * (ROWS / 4), same_queries);
            }
            if (tile == filled) {
                cp_async_wait_all();
                fence_async_proxy();
                mbarrier_arrive(shared_address(&shared.q_full));
            }
            if (tile == last) break;
            const TileChunks chunks(p, work, pages, chunk_log2, tile);
            const int b = (tile - work.first) % STAGES;
            const uint32_t empty_phase = (phase >> b & 1) ^ 1;
            const auto load_boxes = [&](int first, int count) {
                chunks.for_each(p, pages, [&](const Chunk& chunk) {
#pragma unroll
                    for (int box = first; box < first + count; ++box) {
                        const uint32_t full = shared_address(&shared.full[b][box]);
                        if (chunk.offset == 0) mbarrier_arrive_expect_bytes(full, chunks.box_bytes());
                        chunk.load_box(&p.kv_map, box, shared_address(shared.kv[b][box]), full, policy);
                    }
                });
            };
            if (ROPE_BOXES > 0 && warp == 0) {
                wait_barrier(shared.empty[b][QUARTERS], empty_phase);
                load_boxes(ROPE_BOX, 1);
            }
            wait_barrier(shared.empty[b][warp], empty_phase);
            load_boxes(warp * QUARTER_BOXES, QUARTER_BOXES);
            __syncwarp();
            phase ^= 1u << b;
        }
    }
    const uint32_t buffer = phase >> STAGES & 1;
    if (threadIdx.x == CONSUMERS) shared.work[buffer].splits.count = 0;
    wait_barrier(shared.q_empty, buffer ^ 1);
    mbarrier_arrive(shared_address(&shared.q_full));
}

}  // namespace paged_mla_decode
