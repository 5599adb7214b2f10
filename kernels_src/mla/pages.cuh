// Where the keys of a tile lie in the pages, and the copies that bring them.
#pragma once
#include "work.cuh"

namespace paged_mla_decode {

// As one instruction: atomicOr would gather the warp's first, in registers that the producer does not have.
DEVICE void report_outside_page(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

// Page ids of one request, 32 at a time in the lanes of a warp.
struct PageWindow {
    int base = -1;  // first table column held
    int page = 0;
    // Has those of the columns from `first` on brought to L1.
    DEVICE static void expect(const Params& p, const Piece& piece, int first) {
        const int column = first + threadIdx.x % 32;
        const int columns = ((piece.length - 1) >> p.page_size_log2) + 1;
        if (column < columns)
            touch(static_cast<const int*>(p.page_table) + static_cast<uint32_t>(piece.request) * p.table_stride + column);
    }
    // Makes the columns from `first` to `last`, fewer than 32, ready for `at`.
    DEVICE void hold(const Params& p, const Piece& piece, int first, int last) {
        if (base >= 0 && last < base + 32) return;
        base = first;
        const int column = first + threadIdx.x % 32;
        const int columns = ((piece.length - 1) >> p.page_size_log2) + 1;
        page = column < columns ? static_cast<const int*>(p.page_table)[static_cast<uint32_t>(piece.request) * p.table_stride + column] : 0;
        const int inside = min(max(page, 0), p.num_pages - 1);
        if (inside != page) report_outside_page(p);
        page = inside;
    }
    DEVICE int at(int column) const { return __shfl_sync(~0u, page, column - base); }
};

// How the keys of a tile lie in the pages.
struct TilePages {
    int chunks;  // pages that have keys of it
    int row;     // the first key's token in its page
    int page[TILE_TOKENS / MLA_MIN_PAGE_TOKENS];

    DEVICE TilePages(const Params& p, const Piece& piece, PageWindow& pages, int chunk_log2, int tile) {
        pages.hold(p, piece, tile * TILE_TOKENS >> p.page_size_log2,
                   min(tile * TILE_TOKENS + TILE_TOKENS, piece.length) - 1 >> p.page_size_log2);
        chunks = ((piece.valid(tile) - 1) >> chunk_log2) + 1;
        row = tile * TILE_TOKENS & ((1 << p.page_size_log2) - 1);
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / MLA_MIN_PAGE_TOKENS; ++i)
            page[i] = i < chunks ? pages.at((tile * TILE_TOKENS + (i << chunk_log2)) >> p.page_size_log2) : 0;
    }
};

// The tile's columns of a box, onto a barrier that waits for them.
DEVICE void copy_box(const Params& p, const TilePages& at, int chunk_log2, int box, uint32_t target, uint32_t full,
                     uint64_t policy) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / MLA_MIN_PAGE_TOKENS; ++i) {
        if (i >= at.chunks) break;
        copy_tensor_box_3d(target + (i << (chunk_log2 + ROW_BYTES_LOG2)), &p.kv_map, full, box * BOX_COLUMNS, at.row, at.page[i],
                           policy);
    }
}

// Tokens of a tile that one page holds together.
DEVICE int chunk_tokens_log2(const Params& p) { return min(p.page_size_log2, TILE_TOKENS_LOG2); }

// Keys that several CTAs read are to stay in L2.
DEVICE uint64_t keys_policy(const Params& p) { return p.cta_group_size == 1 ? evict_first_policy() : evict_normal_policy(); }

// To L2 alone.
DEVICE void prefetch_bytes(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

DEVICE void prefetch_tensor_box_3d(const void* map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

constexpr int GUESSED_TILES = 2;
// With row tiles of 64 a guess costs a CTA of few tiles more than it saves.
constexpr int GUESSING_TILES = ROWS < 64 ? 0 : 8;
// While the lengths are still read, by four warps: to L2 the first keys and queries that are this CTA's if all requests are as
// long as their bound. What they are matters to nothing but time.
DEVICE void guess_first(const Params& p, int warp) {
    const int lane = threadIdx.x % 32;
    const uint32_t team = over_team(p, blockIdx.x), teams = over_team(p, gridDim.x);
    const uint32_t member = blockIdx.x - team * p.cta_group_size;
    const uint32_t blocks = row_blocks(p, tiles_of_rows(p, p.q_len));
    const uint32_t pairs = p.batch * blocks, tiles = tile_count(p.max_seq_len);
    if (pairs * tiles < GUESSING_TILES * teams) return;
    const uint32_t pair = team * pairs / teams, request = pair / blocks;
    const uint32_t first = (team * pairs - pair * teams) * tiles / teams;
    const int token = first * TILE_TOKENS + (lane << chunk_tokens_log2(p));
    if (token < min((first + GUESSED_TILES) * TILE_TOKENS, p.max_seq_len)) {
        const int page = static_cast<const int*>(p.page_table)[request * p.table_stride + (token >> p.page_size_log2)];
        for (int box = member * 4 + warp; box * BOX_COLUMNS < COLUMNS; box += p.cta_group_size * 4)
            prefetch_tensor_box_3d(&p.kv_map, box * BOX_COLUMNS, token & ((1 << p.page_size_log2) - 1),
                                   min(max(page, 0), p.num_pages - 1));
    }
    const int row = ((pair - request * blocks) * p.cta_group_size + member) * ROWS + warp * (ROWS / 4) + lane;
    if (p.q_cu_seq_lens == nullptr && lane < ROWS / 4 && row < p.q_len * p.heads) {
        const int query = row / p.heads, item_log2 = p.q_type != TYPE_E4M3;
        const int64_t place = (request * p.q_len + query) * p.q_token_stride + (row - query * p.heads) * p.q_head_stride;
        prefetch_bytes(static_cast<const char*>(p.q) + (place << item_log2), COLUMNS << item_log2);
    }
}

}  // namespace paged_mla_decode
