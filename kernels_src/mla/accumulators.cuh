// What leaves the accumulators of a consumer warpgroup.
#pragma once
#include "layout.cuh"
#include "output.cuh"

namespace paged_mla_decode {

// Rows lane / 4 and 8 more of the warp's 16; four lanes hold 8 neighbouring columns, and swap so that each has 8 of its own.
DEVICE void write_rows(const Params& p, const Piece& piece, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                       const float (&maximum)[2], const float (&sum)[2]) {
    const int lane = threadIdx.x % 32;
    const float scale = output_scale(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + half * 8;
        const bool exists = own < piece.rows;
        const int head = (piece.row_tile * ROWS + min(own, piece.rows - 1)) % p.heads;
        const RowEnd end = end_row(p, maximum[half], sum[half], head, scale);
        if (exists && column == 0 && lane % 4 == 0) write_lse(p, piece, own, end.lse);
        const int64_t offset =
            row_offset(piece, min(own, piece.rows - 1), p.heads, p.out_token_stride, p.out_head_stride) + column;
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 8; j += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = pack_two(p, out[4 * (j + i) + 2 * half] * end.factor, out[4 * (j + i) + 2 * half + 1] * end.factor);
            // Lane l of four gets the pairs of group j + l: two rounds of swaps.
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (i & step) continue;
                    const bool upper = lane & step;
                    const uint32_t sent = upper ? pairs[i] : pairs[i + step];
                    const uint32_t got = __shfl_xor_sync(~0u, sent, step);
                    if (upper)
                        pairs[i] = got;
                    else
                        pairs[i + step] = got;
                }
            }
            if (!exists) continue;
            const int64_t at = offset + 8 * (j + lane % 4);
            if (p.out_type != TYPE_E4M3)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            else
                *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) + at) =
                    make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
    }
}

DEVICE void write_partial(const Params& p, const Piece& piece, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                          const float (&maximum)[2], const float (&sum)[2]) {
    if (row / 16 * 16 >= piece.rows) return;
    const int slot = slot_of(p, piece, piece.part);
    float4* target = static_cast<float4*>(p.partial_out) + partial_place(slot, column / 8, threadIdx.x % WARPGROUP);
#pragma unroll
    for (int j = 0; j < HALF_COLUMNS / 8; ++j)
        target[j * WARPGROUP] = make_float4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
    if (column == 0 && threadIdx.x % 4 == 0)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            static_cast<float2*>(p.partial_statistics)[slot_row(slot, row + half * 8)] = make_float2(maximum[half], sum[half]);
}

}  // namespace paged_mla_decode
