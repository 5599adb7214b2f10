// The producer warp: page table -> boxes of K and V in the ring.
#pragma once
#include "work.cuh"

namespace paged_decode {

// Page ids of one request, 32 at a time in the lanes of the producer warp.
struct PageWindow {
    int base = -1;  // first table column held
    int page = 0;
    DEVICE int get(const Params& p, int request, int column, int columns) {
        if (base < 0 || column >= base + 32) {
            base = column;
            const int own = column + threadIdx.x % 32;
            page = own < columns ? static_cast<const int*>(p.page_table)[request * p.table_stride + own] : 0;
            if (page < 0 || page >= p.num_pages) {
                page = min(max(page, 0), p.num_pages - 1);
                atomicOr(static_cast<uint32_t*>(p.status), STATUS_PAGE_OUTSIDE_POOL);
            }
        }
        return __shfl_sync(~0u, page, column - base);
    }
};

// The queries of a piece come to L2 while the consumers are still busy with the one before.
DEVICE void prefetch_query(const Params& p, const Piece& piece) {
    constexpr int LINES = HEAD_DIM * 2 <= 128 ? 1 : HEAD_DIM * 2 / 128;  // of a row, at most
    const int item = p.q_type == E4M3 ? 1 : 2;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < piece.rows * LINES; i += 32) {
        const RowPlace place = place_of(p, piece.row_tile * ROWS + i / LINES);
        const int64_t element = (piece.request.q_start + place.token) * p.q_token_stride +
                                (piece.head * p.group + place.head) * p.q_head_stride;
        if (i % LINES * 128 < HEAD_DIM * item) prefetch_to_l2(static_cast<const char*>(p.q) + element * item + i % LINES * 128);
    }
}

DEVICE void produce(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int page_tokens = 1 << p.page_size_log2;
    const int chunk = min(page_tokens, TILE_TOKENS);  // tokens of a tile that one page holds together
    RingCursor cursor;
    uint32_t emptied = 1;  // a fresh barrier counts as emptied once
#if USE_TMA
    const uint64_t policy = evict_first_policy();
#endif
    for_each_piece(p, share, [&](const Piece& piece) {
        prefetch_query(p, piece);
        PageWindow pages;
        const Request& r = piece.request;
        const int columns = (r.length + page_tokens - 1) >> p.page_size_log2;
        const int first_column = piece.begin >> p.page_size_log2;  // pages in front of every window may be gone
        for (int tile = piece.first; tile < piece.last; ++tile) {
            const int token = (r.first_tile + tile) * TILE_TOKENS;
            const int valid = min(r.length - token, TILE_TOKENS);
            if (valid <= 0) continue;
            // Lane i of the first chunks holds the page of chunk i.
            int page = 0;
            const int chunks = (valid + chunk - 1) / chunk;
            for (int i = 0; i < chunks; ++i) {
                const int column = max((token + i * chunk) >> p.page_size_log2, first_column);
                const int found = pages.get(p, r.index, column, columns);
                if (lane == i) page = found;
            }
            for (int kv = 0; kv < 2; ++kv) {
                const uint32_t buffer = shared_address(shared.ring[cursor.index]);
                const uint32_t full = shared_address(&shared.full[cursor.index]);
                mbarrier_wait(shared_address(&shared.empty[cursor.index]), cursor.phase ^ emptied);
#if USE_TMA
                if (lane == 0) mbarrier_arrive_expect_bytes(full, chunks * chunk * TOKEN_BYTES);
                __syncwarp();
                if (lane < chunks) {
                    const void* map = kv == 0 ? &p.k_map : &p.v_map;
                    const int row = (token + lane * chunk) & (page_tokens - 1);
                    for (int span = 0; span < SPANS; ++span)
                        copy_tensor_box_4d(buffer + span * SPAN_BYTES + lane * chunk * SPAN, map, full,
                                           span * (SPAN / ITEM_BYTES), row, piece.head, page, policy);
                }
#else
                constexpr int COLUMNS = TOKEN_BYTES / 16, COPIED_ROWS = 32 / COLUMNS;
                static_assert(COLUMNS <= 32, "a warp copies whole tokens");
                const char* base = static_cast<const char*>(kv == 0 ? p.k : p.v);
                const int64_t page_stride = kv == 0 ? p.k_page_stride : p.v_page_stride;
                const int64_t token_stride = kv == 0 ? p.k_token_stride : p.v_token_stride;
                const int64_t head_offset = piece.head * (kv == 0 ? p.k_head_stride : p.v_head_stride);
                const int column = lane % COLUMNS;  // 16 bytes of a token
                for (int rows = 0; rows < valid; rows += COPIED_ROWS) {
                    const int row = rows + lane / COLUMNS;
                    const int row_page = __shfl_sync(~0u, page, min(row, valid - 1) / chunk);
                    if (row >= valid) continue;
                    const int in_page = (token + row) & (page_tokens - 1);
                    const int64_t element = row_page * page_stride + in_page * token_stride + head_offset;
                    copy_16_bytes(tile_address(buffer, row, column), base + element * ITEM_BYTES + column * 16);
                }
                mbarrier_arrive_after_copies(full);
#endif
                cursor.advance();
            }
        }
    });
}

}  // namespace paged_decode
