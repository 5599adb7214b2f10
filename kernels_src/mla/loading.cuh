// What brings tiles of the cache and queries into shared memory.
#pragma once
#include "work.cuh"
#if !KV_E4M3
#include "buffers.cuh"
#endif

namespace paged_mla_decode {

// As one instruction: atomicOr would gather the warp's first, in registers that the producer does not have.
DEVICE void report_outside_page(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

// Page ids of one request, 32 at a time in the lanes of a warp.
struct PageWindow {
    int base = -1;  // first table column held
    int page = 0;
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

constexpr int ROW_BYTES_LOG2 = KV_E4M3 ? 6 : 7;  // of a token in a box

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

constexpr int CHUNKS = BOXES * 8;  // of 8 columns in a row, 16 bytes each as the products read them

#if !KV_E4M3
// Row R of a request is head R % heads of its query token R / heads; rows past the last are zero. A warp copies 16 rows, or
// what of them P was written over.
DEVICE void copy_queries(const Params& p, const Piece& piece, Shared& shared, int warp, bool rope_only) {
    const int lane = threadIdx.x % 32, first = warp * (ROWS / 4);
    const int token = (piece.row_tile * ROWS + first) / p.heads;
    int head = piece.row_tile * ROWS + first - token * p.heads;
    const char* const q = static_cast<const char*>(p.q);
    const char* source = q + ((piece.first_query + token) * p.q_token_stride + head * p.q_head_stride) * 2 + lane * 16;
    const int64_t to_head = p.q_head_stride * 2, to_token = (p.q_token_stride - p.heads * p.q_head_stride) * 2;
    const uint32_t place = shared_address(shared.q[lane / 8]) + first * 128;
#pragma unroll 8
    for (int row = 0; row < ROWS / 4; ++row) {
        const bool exists = first + row < piece.rows;
        const char* from = exists ? source : q;
        const uint32_t to = place + row * 128 + ((lane % 8) ^ (row % 8)) * 16;
#pragma unroll
        for (int i = 0; i < (CHUNKS + 31) / 32; ++i)
            if (lane + i * 32 < CHUNKS && (!rope_only || lane + i * 32 >= ROPE_BOX * 8))
                copy_16_bytes_or_zeros(to + i * 4 * BOX_BYTES, from + i * 512, exists ? 16 : 0);
        source += to_head;
        if (++head == p.heads) head = 0, source += to_token;
    }
}

// Each of four warps brings a quarter of every tile as soon as its place is free, the first also the rope columns, and a
// quarter of the queries' rows. The first piece's queries come before its keys, the others', whose place becomes free last,
// after the first keys.
DEVICE void load(const Params& p, const Share& share, Shared& shared) {
    static_assert(HELPERS / 32 == QUARTERS);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 - CONSUMERS / 32, 0);
    const int chunk_log2 = chunk_tokens_log2(p);
    const uint64_t policy = keys_policy(p);
    uint32_t phase = 0;  // bit b: of the next wait for buffer b to be empty; bit BUFFERS: for the queries' place
    bool begun = false;
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        PageWindow pages;
        const int last = piece.first + piece.steps(), filled = min(piece.first + BUFFERS, last);
        const int queries_at = begun ? filled : piece.first;
        const bool same_queries = begun && piece.part > 0;  // this CTA had the part before
        begun = true;
#pragma unroll 1
        for (int tile = piece.first;; ++tile) {
            if (tile == queries_at) {
                wait_barrier(shared.q_empty, (phase >> BUFFERS & 1) ^ 1);
                phase ^= 1u << BUFFERS;
                copy_queries(p, piece, shared, warp, same_queries);
            }
            if (tile == filled) {
                wait_for_copies();
                fence_async_proxy();
                mbarrier_arrive(shared_address(&shared.q_full));
            }
            if (tile == last) break;
            const TilePages at(p, piece, pages, chunk_log2, tile);
            const int b = (tile - piece.first) % BUFFERS;
            const uint32_t parity = (phase >> b & 1) ^ 1;
            const auto load_boxes = [&](int first, int count) {
                if (!elect_one()) return;
#pragma unroll
                for (int box = first; box < first + count; ++box) {
                    const uint32_t full = shared_address(&shared.full[b][box]);
                    mbarrier_arrive_expect_bytes(full, at.chunks << (chunk_log2 + ROW_BYTES_LOG2));
                    copy_box(p, at, chunk_log2, box, shared_address(shared.kv[b][box]), full, policy);
                }
            };
            if (warp == 0) {
                wait_barrier(shared.empty[b][QUARTERS], parity);
                load_boxes(ROPE_BOX, 1);
            }
            wait_barrier(shared.empty[b][warp], parity);
            load_boxes(warp * QUARTER_BOXES, QUARTER_BOXES);
            __syncwarp();
            phase ^= 1u << b;
        }
    }
}
#endif

}  // namespace paged_mla_decode
