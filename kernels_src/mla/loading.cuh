// What brings data into shared memory: one warp for tiles of the cache, three for the queries.
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

// Lane i of a warp has box i. A buffer becomes free in two halves: the columns of the first consumer warpgroup, and the
// others. In a cluster each CTA brings its part of the boxes to all. The rope columns, which hold P once the scores are known, go with the half of the warpgroup that reads that P.
DEVICE void produce(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int page_tokens = 1 << p.page_size_log2;
    const int chunk_log2 = min(p.page_size_log2, TILE_TOKENS_LOG2);  // tokens of a tile that one page holds together
    uint32_t phase = 0;                               // bit b: of the next wait for buffer b to be empty
    const uint64_t policy = p.tiles_together == 1 ? evict_first_policy() : evict_normal_policy();
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        PageWindow pages;
        const int last = piece.first + piece.steps();
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            const int far = min(tile + PREFETCH_TILES, last - 1);
            pages.hold(p, piece, tile * TILE_TOKENS >> p.page_size_log2,
                       min(far * TILE_TOKENS + TILE_TOKENS, piece.length) - 1 >> p.page_size_log2);
            const int chunks = ((piece.valid(tile) - 1) >> chunk_log2) + 1;
            const int b = (tile - piece.first) % BUFFERS;
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                if (CLUSTER == 1)
                    wait_barrier(shared.empty[b][half], (phase >> b & 1) ^ 1, 10 + 2 * b + half);
                else
                    wait_cluster_barrier(shared.empty[b][half], (phase >> b & 1) ^ 1);
                const bool own = half == 0 ? lane < HALF_BOXES : lane >= HALF_BOXES && lane < BOXES;
                const uint32_t full = shared_address(&shared.full[b][min(lane, BOXES - 1)]);
                if (own) mbarrier_arrive_expect_bytes(full, chunks << (chunk_log2 + 7));
#pragma unroll 1
                for (int i = 0; i < chunks; ++i) {
                    const int token = tile * TILE_TOKENS + (i << chunk_log2);
                    const int page = pages.at(token >> p.page_size_log2);
                    const uint32_t target = shared_address(shared.kv[b][min(lane, BOXES - 1)]) + (i << (chunk_log2 + 7));
#if CLUSTER == 1
                    if (own)
                        copy_tensor_box_3d(target, &p.kv_map, full, lane * BOX_COLUMNS, token & (page_tokens - 1), page,
                                           policy);
#else
                    if (own && lane % CLUSTER == share.member % CLUSTER)
                        copy_tensor_box_3d_to_cluster(target, &p.kv_map, full, lane * BOX_COLUMNS,
                                                      token & (page_tokens - 1), page, (1 << CLUSTER) - 1, policy);
#endif
                }
            }
            phase ^= 1u << b;
            if (far < tile + PREFETCH_TILES || PREFETCH_TILES == 0) continue;
#pragma unroll 1
            for (int i = 0; i <= (piece.valid(far) - 1) >> chunk_log2; ++i) {
                const int token = far * TILE_TOKENS + (i << chunk_log2);
                const int page = pages.at(token >> p.page_size_log2);
                if (lane < BOXES && (CLUSTER == 1 || lane % CLUSTER == share.member % CLUSTER))
                    prefetch_tensor_box_3d(&p.kv_map, lane * BOX_COLUMNS, token & (page_tokens - 1), page);
            }
        }
    }
}

// Row R of a request is head R % heads of its query token R / heads; rows past the last are zero.
DEVICE void load_queries(const Params& p, const Share& share, Shared& shared) {
    constexpr int CHUNKS = BOXES * 8;  // of 16 bytes in a row
    const int thread = threadIdx.x - CONSUMERS - 32;
    uint32_t phase = 0;
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        wait_barrier(shared.q_empty, phase ^ 1, 20);
        const __nv_bfloat16* q = static_cast<const __nv_bfloat16*>(p.q) + piece.first_query * p.q_token_stride;
#pragma unroll 1
        for (int i = thread; i < ROWS * CHUNKS; i += LOADERS) {
            const int row = i / CHUNKS, column = i % CHUNKS;
            const int request_row = piece.row_tile * ROWS + min(row, piece.rows - 1);
            const int token = request_row / p.heads, head = request_row % p.heads;
            const uint32_t target =
                shared_address(shared.q[column / 8]) + row * 128 + ((column % 8) ^ (row % 8)) * 16;
            copy_16_bytes_or_zeros(target, q + token * p.q_token_stride + head * p.q_head_stride + column * 8,
                                   row < piece.rows ? 16 : 0);
        }
        wait_for_copies();
        fence_async_proxy();
        mbarrier_arrive(shared_address(&shared.q_full));
        phase ^= 1;
    }
}

}  // namespace paged_mla_decode
