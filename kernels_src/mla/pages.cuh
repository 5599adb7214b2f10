// TMA copies of KV tiles from the pages of the cache, and prefetches to L2.
#pragma once
#include "../common/paged_kv.cuh"
#include "scheduler.cuh"

namespace paged_mla_decode {

using paged_kv::chunk_tokens_log2;
using paged_kv::PageWindow;

// A part of a KV tile that lies in one page.
struct Chunk {
    int offset;  // bytes from the beginning of a box in shared memory
    int row, page;  // of its first key

    // Loads its columns of a box of the cache that `map` describes; `full` counts the bytes.
    DEVICE void load_box(const void* map, int box, uint32_t target, uint32_t full, uint64_t policy) const {
        tma_load_3d(target + offset, map, full, box * BOX_COLUMNS, row, page, policy);
    }
};

// The chunks of a KV tile that hold keys.
struct TileChunks {
    int token, page;  // of the first
    int count, log2;

    DEVICE TileChunks(const Params& p, const WorkTile& work, PageWindow& pages, int chunk_log2, int tile)
        : token(tile * TILE_TOKENS), log2(chunk_log2) {
        pages.move_to(p, paged_kv::page_ids(p, work.request), 0, work.kv_len, token);
        page = pages.page_of(token >> p.page_size_log2);
        count = paged_kv::chunk_count(work.kv_len, token, chunk_log2);
    }

    DEVICE uint32_t box_bytes() const { return count << (log2 + ROW_BYTES_LOG2); }

    // Calls `load` in one thread of the warp for each chunk.
    template <class Load>
    DEVICE void for_each(const Params& p, const PageWindow& pages, const Load& load) const {
        Chunk chunk{0, token & ((1 << p.page_size_log2) - 1), page};
#pragma unroll 1
        for (int i = 0;;) {
            if (elect_one()) load(chunk);
            if (++i == count) break;
            chunk = {i << (log2 + ROW_BYTES_LOG2), 0, pages.page_of((token + (i << log2)) >> p.page_size_log2)};
        }
    }
};

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
