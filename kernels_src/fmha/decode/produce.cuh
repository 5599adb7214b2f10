// The producer warps: page table -> boxes of K and V in the ring.
#pragma once
#include "queries.cuh"

namespace paged_decode {

// Page ids of one request, 32 table columns at a time in the lanes of a warp, the next 32 on their way.
struct PageWindow {
    int held = -2;  // which 32 columns
    int page = 0, ahead = 0;

    // Columns in front of every row's window and past the length are not read: their keys are never seen.
    DEVICE int load(const Params& p, const Piece& piece, int window) const {
        const int first = piece.begin >> p.page_size_log2;
        const int last = (piece.request.length - 1) >> p.page_size_log2;
        const int column = window * 32 + threadIdx.x % 32;
        if (column < first || column > last) return 0;
        return static_cast<const int*>(p.page_table)[piece.request.index * p.table_stride + column];
    }

    DEVICE void move_to(const Params& p, const Piece& piece, int window) {
        if (window == held) return;
        page = window == held + 1 ? ahead : load(p, piece, window);
        ahead = load(p, piece, window + 1);
        held = window;
        if (page < 0 || page >= p.num_pages) {
            page = min(max(page, 0), p.num_pages - 1);
            atomicOr(static_cast<uint32_t*>(p.status), STATUS_PAGE_OUTSIDE_POOL);
        }
    }
};

// The queries of a piece come to L2 while the consumers are still busy with the one before.
DEVICE void prefetch_query(const Params& p, const Piece& piece) {
    constexpr int LINES = HEAD_DIM * 2 <= 128 ? 1 : HEAD_DIM * 2 / 128;  // of a row, at most
    const int item = p.q_type == TYPE_E4M3 ? 1 : 2;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < piece.rows.count * LINES; i += 32) {
        if (i % LINES * 128 < HEAD_DIM * item) prefetch_to_l2(query_row(p, piece, i / LINES) + i % LINES * 128);
    }
}

// Producer warp `warp`: keys or values of every (PRODUCER_WARPS / 2)-th tile.
DEVICE void produce(const Params& p, const Share& share, int warp, Shared& shared) {
    constexpr int TURNS = PRODUCER_WARPS / 2;
    const int lane = threadIdx.x % 32;
    const bool values = warp % 2;
    const int page_tokens = 1 << p.page_size_log2;
    const int chunk_log2 = min(p.page_size_log2, __ffs(TILE_TOKENS) - 1);
    const int chunk = 1 << chunk_log2;  // tokens of a tile that one page holds together
    RingCursor cursor;
    cursor.advance(warp);
    int turn = warp / 2;      // tiles until this warp's next
    bool first_piece = true;  // whose queries come with those of all that begin
#if USE_TMA
    const uint64_t policy = evict_first_policy();
    const void* map = values ? &p.v_map : &p.k_map;
#else
    const char* base = static_cast<const char*>(values ? p.v : p.k);
    const int64_t page_stride = values ? p.v_page_stride : p.k_page_stride;
    const int64_t token_stride = values ? p.v_token_stride : p.k_token_stride;
    const int64_t head_stride = values ? p.v_head_stride : p.k_head_stride;
#endif
    for_each_piece(p, share, [&](const Piece& piece) {
        if (warp == 0 && !first_piece) prefetch_query(p, piece);
        first_piece = false;
        PageWindow pages;
        const Request& r = piece.request;
        const int end = end_of_keys(piece);
        int tile = piece.first + turn;
        for (; tile < end; tile += TURNS) {
            const int token = (r.first_tile + tile) * TILE_TOKENS;
            const int chunks = (min(r.length - token, TILE_TOKENS) + chunk - 1) >> chunk_log2;
            const int column = token >> p.page_size_log2;  // a tile's columns are in one window
            pages.move_to(p, piece, column / 32);
            const int page = __shfl_sync(~0u, pages.page, column % 32 + min(lane, chunks - 1));  // of the lane's chunk
            const uint32_t buffer = shared_address(shared.ring[cursor.index]);
            const uint32_t full = shared_address(&shared.full[cursor.index]);
            mbarrier_wait(shared_address(&shared.empty[cursor.index]), cursor.phase ^ 1);  // a fresh one counts as emptied once
#if USE_TMA
            if (lane == 0) mbarrier_arrive_expect_bytes(full, chunks * chunk * TOKEN_BYTES);
            if (lane < chunks) {
                const int row = (token + lane * chunk) & (page_tokens - 1);
#pragma unroll
                for (int span = 0; span < SPANS; ++span)
                    copy_tensor_box_4d(buffer + span * SPAN_BYTES + lane * chunk * SPAN, map, full, span * (SPAN / ITEM_BYTES),
                                       row, piece.rows.head, page, policy);
            }
#else
            constexpr int COLUMNS = TOKEN_BYTES / 16, COPIED_ROWS = 32 / COLUMNS;
            static_assert(COLUMNS <= 32, "a warp copies whole tokens");
            const int valid = min(r.length - token, TILE_TOKENS);
            for (int rows = 0; rows < valid; rows += COPIED_ROWS) {
                const int row = rows + lane / COLUMNS;
                const int row_page = __shfl_sync(~0u, page, min(row, valid - 1) >> chunk_log2);
                if (row >= valid) continue;
                const int in_page = (token + row) & (page_tokens - 1);
                const int64_t element = row_page * page_stride + in_page * token_stride + piece.rows.head * head_stride;
                copy_16_bytes(tile_address(buffer, row, lane % COLUMNS), base + element * ITEM_BYTES + lane % COLUMNS * 16);
            }
            mbarrier_arrive_after_copies(full);
#endif
            cursor.advance(PRODUCER_WARPS);
        }
        turn = tile - max(end, piece.first);
    });
}

}  // namespace paged_decode
