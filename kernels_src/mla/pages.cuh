// TMA copies of KV tiles from the pages of the cache, and prefetches to L2.
#pragma once
#include "../common/paged_kv.cuh"
#include "scheduler.cuh"

namespace paged_mla_decode {

using paged_kv::chunk_tokens_log2;
using paged_kv::PageWindow;

// Where a KV tile lies in the pages.
struct TilePages {
    int chunks;  // that hold keys of it
    int row;  // the first key's token in its page
    int page[TILE_TOKENS / MLA_MIN_PAGE_TOKENS];

    DEVICE TilePages(const Params& p, const WorkTile& work, PageWindow& pages, int chunk_log2, int tile) {
        const int token = tile * TILE_TOKENS;
        pages.move_to(p, paged_kv::page_ids(p, work.request), 0, work.kv_len, token);
        chunks = paged_kv::chunk_count(work.kv_len, token, chunk_log2);
        row = token & ((1 << p.page_size_log2) - 1);
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / MLA_MIN_PAGE_TOKENS; ++i)
            page[i] = i < chunks ? pages.page_of((token + (i << chunk_log2)) >> p.page_size_log2) : 0;
    }
};

// Loads the tile's columns of a box of the cache that `map` describes; `full` counts the bytes.
DEVICE void tma_load_box(const void* map, const TilePages& at, int chunk_log2, int box, uint32_t target, uint32_t full,
                         uint64_t policy) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / MLA_MIN_PAGE_TOKENS; ++i) {
        if (i >= at.chunks) break;
        tma_load_3d(target + (i << (chunk_log2 + ROW_BYTES_LOG2)), map, full, box * BOX_COLUMNS, at.row, at.page[i],
                    policy);
    }
}

// GROUP_L2_POLICY: of keys that several CTAs read.
DEVICE uint64_t kv_l2_policy(const Params& p) {
    return p.cta_group_size == 1 ? l2_policy<L2Policy::L2_POLICY>() : l2_policy<L2Policy::GROUP_L2_POLICY>();
}

// Prefetches to L2 only.
DEVICE void bulk_prefetch_to_l2(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

DEVICE void tma_prefetch_3d(const void* map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2)
                 : "memory");
}

constexpr int SPECULATIVE_TILES = 2;
// With row tiles of 64, speculation costs a CTA with few KV tiles more than it saves.
constexpr int MIN_TILES_TO_SPECULATE = ROWS < 64 ? 0 : 8;
// Four warps prefetch to L2, while the lengths are still being read: the first keys and queries that this CTA would get
// if all requests were as long as their bound. A wrong guess costs time and nothing else.
DEVICE void prefetch_speculatively(const Params& p, int warp) {
    const int lane = threadIdx.x % 32;
    const uint32_t cta_group = divide_by_group_size(p, blockIdx.x), cta_groups = divide_by_group_size(p, gridDim.x);
    const uint32_t cta_rank = blockIdx.x - cta_group * p.cta_group_size;
    const uint32_t tile_groups = tile_groups_of(p, row_tile_count(p, p.q_len));
    const uint32_t pairs = p.batch * tile_groups, tiles = kv_tile_count(p.max_seq_len);
    if (pairs * tiles < MIN_TILES_TO_SPECULATE * cta_groups) return;
    const uint32_t pair = cta_group * pairs / cta_groups, request = pair / tile_groups;
    const uint32_t first = (cta_group * pairs - pair * cta_groups) * tiles / cta_groups;
    const int token = first * TILE_TOKENS + (lane << chunk_tokens_log2(p));
    if (token < min((first + SPECULATIVE_TILES) * TILE_TOKENS, p.max_seq_len)) {
        const int page = paged_kv::page_ids(p, request)[token >> p.page_size_log2];
        for (int box = cta_rank * 4 + warp; box * BOX_COLUMNS < COLUMNS; box += p.cta_group_size * 4)
            tma_prefetch_3d(&p.kv_map, box * BOX_COLUMNS, token & ((1 << p.page_size_log2) - 1),
                            min(max(page, 0), p.num_pages - 1));
    }
    const int row = ((pair - request * tile_groups) * p.cta_group_size + cta_rank) * ROWS + warp * (ROWS / 4) + lane;
    if (p.q_cu_seq_lens == nullptr && lane < ROWS / 4 && row < p.q_len * p.heads) {
        const int query = row / p.heads, item_log2 = p.q_type != TYPE_E4M3;
        const int64_t element =
            (request * p.q_len + query) * p.q_token_stride + (row - query * p.heads) * p.q_head_stride;
        bulk_prefetch_to_l2(static_cast<const char*>(p.q) + (element << item_log2),
                            (rope_memory(p) != nullptr ? LATENT : COLUMNS) << item_log2);
    }
}

}  // namespace paged_mla_decode
