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
    int page[TILE_TOKENS / 32];

    DEVICE TilePages(const Params& p, const Piece& piece, PageWindow& pages, int chunk_log2, int tile) {
        pages.hold(p, piece, tile * TILE_TOKENS >> p.page_size_log2,
                   min(tile * TILE_TOKENS + TILE_TOKENS, piece.length) - 1 >> p.page_size_log2);
        chunks = ((piece.valid(tile) - 1) >> chunk_log2) + 1;
        row = tile * TILE_TOKENS & ((1 << p.page_size_log2) - 1);
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / 32; ++i)
            page[i] = i < chunks ? pages.at((tile * TILE_TOKENS + (i << chunk_log2)) >> p.page_size_log2) : 0;
    }
};

// The tile's columns of a box, onto a barrier that waits for them.
DEVICE void copy_box(const Params& p, const TilePages& at, int chunk_log2, int box, uint32_t target, uint32_t full,
                     uint64_t policy) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 32; ++i) {
        if (i >= at.chunks) break;
        copy_tensor_box_3d(target + (i << (chunk_log2 + ROW_BYTES_LOG2)), &p.kv_map, full, box * BOX_COLUMNS, at.row, at.page[i],
                           policy);
    }
}

// Tokens of a tile that one page holds together.
DEVICE int chunk_tokens_log2(const Params& p) { return min(p.page_size_log2, TILE_TOKENS_LOG2); }

// Keys that several CTAs read are to stay in L2.
DEVICE uint64_t keys_policy(const Params& p) { return p.tiles_together == 1 ? evict_first_policy() : evict_normal_policy(); }

}  // namespace paged_mla_decode
