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

// To L2 alone.
DEVICE void prefetch_tensor_box_3d(const void* map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

constexpr int GUESSED_TILES = 2;
// While the lengths are still read: to L2 the first keys that are this CTA's if all requests are as long as their bound. What
// they are matters to nothing but time.
DEVICE void guess_keys(const Params& p) {
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_LOADER) / 32, 0);
    const int teams = gridDim.x / p.tiles_together, tiles = tile_count(p.max_seq_len);
    const int64_t requests = static_cast<int64_t>(blockIdx.x / p.tiles_together) * p.batch;
    const int request = min(static_cast<int>(requests / teams), p.batch - 1);
    const int first = static_cast<int>(requests % teams * tiles / teams);
    const int end = min(min(first + GUESSED_TILES, tiles) * TILE_TOKENS, p.max_seq_len);
#pragma unroll 1
    for (int token = first * TILE_TOKENS; token < end; token += 1 << chunk_tokens_log2(p)) {
        const int page = static_cast<const int*>(p.page_table)[request * p.table_stride + (token >> p.page_size_log2)];
        if (elect_one())
#pragma unroll 1
            for (int box = warp; box < BOXES; box += LOADER_WARPS)
                prefetch_tensor_box_3d(&p.kv_map, box * BOX_COLUMNS, token & ((1 << p.page_size_log2) - 1),
                                       min(max(page, 0), p.num_pages - 1));
        __syncwarp();
    }
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
