// O += P V by warps: all rows by the warp's columns, in fp16; V is converted on its way from the tile to the products.
// And the stores of O.
#pragma once
#include "shared_storage.cuh"

namespace paged_mla_decode {

constexpr int COLUMN_TILES = WARP_COLUMNS / 16;
// Of 16 rows and 16 columns, the even and the odd columns: a thread has rows lane / 4 + {0, 8}, and of each four
// columns from 4 (lane % 4) on: out[row tile][column tile][column % 2][2 * (row / 8) + column / 2].
using Output = float[ROW_TILES][COLUMN_TILES][2][4];

// Tokens past the length may hold NaN, and 0 x NaN is NaN. `valid`: of 16 tokens.
DEVICE void clear_values(uint32_t (&raw)[4], int valid) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int kept = valid - threadIdx.x % 4 * 2 - i % 2 * 8;
        raw[i] &= kept > 1 ? ~0u : (kept == 1 ? 0xffffu : 0u);
    }
}

// Rescales those 16 rows among which a maximum was raised.
DEVICE void rescale(const SharedStorage& shared, Output& out) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        if (!shared.raised[m]) continue;
        const int row = m * 16 + threadIdx.x % 32 / 4;
        const float factor[2] = {shared.factor[row], shared.factor[row + 8]};
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[m][c][i / 4][i % 4] *= factor[i % 4 / 2];
    }
}

DEVICE void multiply_values(const SharedStorage& shared, int stage, int valid, Output& out) {
    const int lane = threadIdx.x % 32, row = lane % 16;  // of P, and the token of V
    const int column = threadIdx.x / 32 * WARP_COLUMNS;
    const uint32_t p = shared_address(shared.p) + swizzled_offset(row, lane / 16);
    const uint32_t v = shared_address(shared.kv[stage][column / BOX_COLUMNS]) +
                       swizzled_offset(row, column % BOX_COLUMNS / 16 + lane / 16);
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) {
        uint32_t a[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) ldmatrix_x4(a[m], (p ^ step * 32) + m * 16 * P_ROW_BYTES);
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c += 2) {
            uint32_t raw[4];  // pairs of columns of two tokens: tokens 0-7 and 8-15 of 16 columns, then of the next 16
            ldmatrix_x4_trans(raw, (v ^ c * 16) + step * 16 * ROW_BYTES);
            if (valid < TILE_TOKENS) clear_values(raw, valid - step * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t b[2][2];  // [even or odd column][tokens]
#pragma unroll
                for (int i = 0; i < 2; ++i) e4m3_to_fp16(__byte_perm(raw[2 * half + i], 0, 0x3120), b[0][i], b[1][i]);
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
                        mma_fp16_16x8x16(out[m][c + half][odd], a[m], b[odd][0], b[odd][1]);
            }
        }
    }
}

// ---------------------------------------------------------------- epilogue

// Maximum and sum of a row of the work tile.
DEVICE float2 row_statistics(const SharedStorage& shared, int row) {
    float sum = shared.top[0][row];
    for (int w = 1; w < KEY_WARPS; ++w) sum += shared.top[w][row];
    return make_float2(shared.maximum[row], sum);
}

// `v`: the thread's row `half` of 16 and its four neighbouring columns of 16.
DEVICE void gather_columns(const float (&out)[2][4], int half, float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = out[i % 2][2 * half + i / 2];
}

DEVICE void store_rows(const Params& p, const WorkTile& work, const SharedStorage& shared, const Output& out) {
    const float scale = output_scale(p);
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * WARP_COLUMNS + lane % 4 * 4;
    if (PADDED && column >= LATENT) return;
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int row = i / 2 * 16 + i % 2 * 8 + lane / 4;
        if (row >= work.rows) continue;
        const float2 own = row_statistics(shared, row);
        const RowNormalisation norm = normalise_row(p, own.x, own.y, (work.row_tile * ROWS + row) % p.heads, scale);
        if (column == 0) write_lse(p, work, row, norm.lse);
        const int64_t at = row_offset(work, row, p.heads, p.out_token_stride, p.out_head_stride) + column;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            float v[4];
            gather_columns(out[i / 2][c], i % 2, v);
            const uint32_t low = pack_two(p, v[0] * norm.factor, v[1] * norm.factor);
            const uint32_t high = pack_two(p, v[2] * norm.factor, v[3] * norm.factor);
            if (p.out_type != TYPE_E4M3)
                *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at + c * 16) = make_uint2(low, high);
            else
                *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + at + c * 16) = low | high << 16;
        }
    }
}

// The scale of a row, of which four lanes have the warp's columns.
DEVICE RowScale row_scale(const Output& out, int row_tile, int half) {
    float magnitudes = 0.f;
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; ++c)
        for (int i = 0; i < 4; ++i) magnitudes += fabsf(out[row_tile][c][i % 2][2 * half + i / 2]);
    for (int step = 1; step < 4; step *= 2) magnitudes += __shfl_xor_sync(~0u, magnitudes, step);
    return RowScale(magnitudes);
}

// Stores in the order in which the merge reads: its lanes have two columns of a row and of row + 8.
DEVICE void store_partial(const Params& p, const WorkTile& work, const SharedStorage& shared, const Output& out) {
    const int slot = work.splits.slot(work.splits.index);
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * WARP_COLUMNS;
    if (PADDED && column >= LATENT) return;
    uint2* target = static_cast<uint2*>(p.partial_out);
    target += partial_offset(slot, column / 8 + lane % 4 / 2, lane / 4 * 4 + lane % 2 * 2);
    float* scales = row_scales(p, slot, column);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        if (m * 16 >= work.rows) break;
        const RowScale low = row_scale(out, m, 0), high = row_scale(out, m, 1);
        const int row = m * 16 + lane / 4;
        if (lane % 4 == 0) {
            scales[row_place(row)] = low.scale, scales[row_place(row + 8)] = high.scale;
            if (column == 0)
                for (int i = 0; i < 16; i += 8)
                    maxima_and_sums(p, slot)[row_place(row + i)] = row_statistics(shared, row + i);
        }
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            float own[4], other[4];
            gather_columns(out[m][c], 0, own);
            gather_columns(out[m][c], 1, other);
            *reinterpret_cast<uint4*>(target + partial_offset(0, 2 * c, m * 32)) =
                make_uint4(low.pack(own[0], own[1]), high.pack(other[0], other[1]), low.pack(own[2], own[3]),
                           high.pack(other[2], other[3]));
        }
    }
}

}  // namespace paged_mla_decode
