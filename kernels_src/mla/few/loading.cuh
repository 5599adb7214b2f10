// The loaders: queries and tiles into the ring.
#pragma once
#include "../pages.cuh"
#include "layout.cuh"

namespace paged_mla_decode {

DEVICE void copy_bytes(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Row R of a request is head R % heads of its query token R / heads. Each warp brings some of the rows that exist.
DEVICE void copy_queries(const Params& p, const Piece& piece, uint32_t stage, uint32_t full, int warp) {
    constexpr int OWN = ROWS / LOADER_WARPS;
    const int lane = threadIdx.x % 32, row = warp * OWN + lane;
    const int item = p.q_type == TYPE_E4M3 ? 1 : 2;
    if (lane == 0) mbarrier_arrive_expect_bytes(full, min(max(piece.rows - warp * OWN, 0), OWN) * COLUMNS * item);
    __syncwarp();
    if (lane < OWN && row < piece.rows)
        copy_bytes(stage + row * QUERY_PITCH,
                   static_cast<const char*>(p.q) + row_offset(piece, row, p.heads, p.q_token_stride, p.q_head_stride) * item,
                   COLUMNS * item, full);
    __syncwarp();
}

// All four warps bring their boxes of every tile.
DEVICE void load(const Params& p, const Share& share, Shared& shared) {
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_LOADER) / 32, 0);
    const int chunk_log2 = chunk_tokens_log2(p);
    const uint64_t policy = keys_policy(p);
    const int boxes = (BOXES - warp + LOADER_WARPS - 1) / LOADER_WARPS;
    Turn<STAGES> turn;
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        wait_barrier(shared.empty[turn.index], turn.parity ^ 1);
        copy_queries(p, piece, shared_address(shared.ring[turn.index]), shared_address(&shared.full[turn.index]), warp);
        turn.advance();
        PageWindow pages;
        const int last = piece.first + piece.steps();
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            const TilePages at(p, piece, pages, chunk_log2, tile);
            wait_barrier(shared.empty[turn.index], turn.parity ^ 1);
            if (elect_one()) {
                const uint32_t full = shared_address(&shared.full[turn.index]);
                mbarrier_arrive_expect_bytes(full, boxes * at.chunks << (chunk_log2 + ROW_BYTES_LOG2));
#pragma unroll
                for (int i = 0; i < (BOXES + LOADER_WARPS - 1) / LOADER_WARPS; ++i)
                    if (i < boxes)
                        copy_box(p, at, chunk_log2, warp + i * LOADER_WARPS,
                                 shared_address(shared.ring[turn.index]) + (warp + i * LOADER_WARPS) * BOX_BYTES, full, policy);
            }
            __syncwarp();
            turn.advance();
        }
    }
}

}  // namespace paged_mla_decode
