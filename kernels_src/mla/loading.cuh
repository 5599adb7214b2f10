// What brings tiles of the cache and queries into shared memory.
#pragma once
#include "buffers.cuh"
#include "pages.cuh"

namespace paged_mla_decode {

constexpr int CHUNKS = BOXES * 8;  // of 8 columns in a row, 16 bytes each as the products read them

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
// quarter of the queries' rows; they also tell the consumers the pieces. The first piece's queries come before its keys, the
// others', whose place becomes free last, after the first keys.
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
        if (threadIdx.x == CONSUMERS) shared.piece[phase >> BUFFERS & 1] = piece;
        PageWindow pages;
        pages.expect(p, piece, piece.first * TILE_TOKENS >> p.page_size_log2);  // under way with the queries
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
    const uint32_t turn = phase >> BUFFERS & 1;
    if (threadIdx.x == CONSUMERS) shared.piece[turn].parts = 0;
    wait_barrier(shared.q_empty, turn ^ 1);
    mbarrier_arrive(shared_address(&shared.q_full));
}

}  // namespace paged_mla_decode
