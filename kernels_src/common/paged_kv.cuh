// Paged KV cache: the page table of a request, as a producer warp walks it, and how a KV tile lies in the pages.
//
// Build: -DTILE_TOKENS=n keys of a KV tile, a power of two.
#pragma once
#include "KernelConstants.h"
#include "ptx.cuh"

namespace paged_kv {

// Tokens of a KV tile that lie in one page together: a chunk.
template <class Params>
DEVICE int chunk_tokens_log2(const Params& p) {
    static_assert((TILE_TOKENS & (TILE_TOKENS - 1)) == 0, "a power of two");
    return min(p.page_size_log2, __ffs(TILE_TOKENS) - 1);
}

// Chunks of the KV tile from key `token` on that hold keys.
DEVICE int chunk_count(int kv_len, int token, int chunk_log2) {
    return (min(kv_len - token, TILE_TOKENS) + (1 << chunk_log2) - 1) >> chunk_log2;
}

// The page ids of a request; with a table of their own, those of its keys.
template <class Params>
DEVICE const int* page_ids(const Params& p, int request) {
    return static_cast<const int*>(p.page_table) + request * p.table_stride;
}

// A single instruction: atomicOr would combine the warp's operands first, in registers that producers do not have.
template <class Params>
DEVICE void report_invalid_page(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

// Page ids of one request: a window of 32 page table columns in the lanes of a warp, and the next window ahead. All
// columns of a KV tile are in one window.
struct PageWindow {
    int loaded = -2;  // number of the window in `page`
    int page = 0, ahead = 0;

    // Loads of the request's `ids` those of a window for the keys [begin, kv_len), which are some; other columns are
    // not read, since no row sees their keys.
    template <class Params>
    DEVICE static int load(const Params& p, const int* ids, int begin, int kv_len, int window) {
        const int first = begin >> p.page_size_log2;
        const int last = (kv_len - 1) >> p.page_size_log2;
        const int column = window * 32 + threadIdx.x % 32;
        if (column < first || column > last) return 0;
        return ids[column];
    }

    // Prefetches the ids from that of the key `token` on to L1.
    template <class Params>
    DEVICE static void prefetch(const Params& p, const int* ids, int kv_len, int token) {
        const int column = (token >> p.page_size_log2) + threadIdx.x % 32;
        if (column <= (kv_len - 1) >> p.page_size_log2) prefetch_to_l1(ids + column);
    }

    // Goes to the window of the key `token`.
    template <class Params>
    DEVICE void move_to(const Params& p, const int* ids, int begin, int kv_len, int token) {
        const int window = (token >> p.page_size_log2) / 32;
        if (window == loaded) return;
        page = window == loaded + 1 ? ahead : load(p, ids, begin, kv_len, window);
        ahead = load(p, ids, begin, kv_len, window + 1);
        loaded = window;
        if (page < 0 || page >= p.num_pages) {
            page = min(max(page, 0), p.num_pages - 1);
            report_invalid_page(p);
        }
    }

    // The page of a column of the window; each lane may ask for another one.
    DEVICE int page_of(int column) const { return __shfl_sync(~0u, page, column % 32); }
};

}  // namespace paged_kv
