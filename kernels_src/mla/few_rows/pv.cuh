// PV warps of the kernel for few rows: O^T += V^T P^T, 64 columns per warp, and the epilogue.
#pragma once
#include "../epilogue.cuh"
#include "shared_storage.cuh"

namespace paged_mla_decode {

constexpr int COLUMN_TILES = 4;  // of 16 columns, in a warp
// Rows 2 (lane % 4) + {0, 1} of groups of 8 rows. Columns lane / 4 of 16, then those + 8; with an e4m3 cache, whose
// bytes come in pairs, the even and the odd columns of 16.
using Output = float[COLUMN_TILES][ROWS / 8][4];

#if SPARSE && KV_E4M3
DEVICE int scale_block_of_warp() { return threadIdx.x / 64; }

// Scales of the warp's columns go to P, of which there is less than of V.
DEVICE void scale_probabilities(const Probabilities& p, int step, uint4& b) {
    const uint16_t* factors = p.value_factor[scale_block_of_warp()] + step * 16 + threadIdx.x % 4 * 2;
    const uint32_t low = *reinterpret_cast<const uint32_t*>(factors);
    const uint32_t high = *reinterpret_cast<const uint32_t*>(factors + 8);
    b = make_uint4(multiply_fp16(b.x, low), multiply_fp16(b.y, high), multiply_fp16(b.z, low),
                   multiply_fp16(b.w, high));
}

DEVICE float block_factor(const Probabilities& p) { return p.block_factor[scale_block_of_warp()]; }
#else
DEVICE void scale_probabilities(const Probabilities&, int, const uint4&) {}
#endif

// Clears the warp's columns of the keys past `valid`, which may be NaN: 0 x NaN is NaN. In shared memory, since a
// product that masks its operands is code of its own, which would be fetched from DRAM for the last tile. QK warps have
// read them.
DEVICE void clear_missing_values(const SharedStorage& shared, PipelineState<STAGES> state, int valid) {
    constexpr int ITEM = KV_E4M3 ? 1 : 2, PIECES = 64 * ITEM / 16, STAGE_TOKENS = TILE_TOKENS / STAGES_OF_TILE;
    const int lane = threadIdx.x % 32, byte = threadIdx.x / 32 * 64 * ITEM + lane % PIECES * 16;
#pragma unroll 1
    for (int stage = 0; stage < STAGES_OF_TILE; ++stage, state.advance())
        for (int token = max(valid - stage * STAGE_TOKENS, 0) + lane / PIECES; token < STAGE_TOKENS;
             token += 32 / PIECES)
            store_shared_uint4(shared_address(shared.stages[state.index]) + stage_offset(byte, token),
                               make_uint4(0, 0, 0, 0));
    __syncwarp();
}

// `values` are the lane's first 16 bytes in each stage.
DEVICE void multiply_values(const uint32_t (&values)[STAGES_OF_TILE], const Probabilities& p, Output& out) {
    constexpr int STAGE_STEPS = KEY_WARPS / STAGES_OF_TILE;  // of 16 keys
    constexpr int LOADS = KV_E4M3 ? COLUMN_TILES / 2 : COLUMN_TILES;  // of 32 bytes of each of 16 keys
    const int lane = threadIdx.x % 32;
    uint4 b[KEY_WARPS][ROWS / 16];
#pragma unroll
    for (int step = 0; step < KEY_WARPS; ++step)
#pragma unroll
        for (int n = 0; n < ROWS / 16; ++n) {
            b[step][n] = p.fragment[n][step][lane];
            scale_probabilities(p, step, b[step][n]);
        }
    const auto add = [&](const uint32_t (&v)[4], int step, float (&to)[ROWS / 8][4]) {
#pragma unroll
        for (int n = 0; n < ROWS / 16; ++n) {
            multiply(to[2 * n], v, b[step][n].x, b[step][n].y);
            multiply(to[2 * n + 1], v, b[step][n].z, b[step][n].w);
        }
    };
    uint32_t raw[2][LOADS][4];
    const auto load = [&](int step) {
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            ldmatrix_x4_trans(raw[step % 2][j],
                              value_offset(values[step / STAGE_STEPS], j) + step % STAGE_STEPS * 16 * KEY_PITCH);
    };
    load(0);
#pragma unroll
    for (int step = 0; step < KEY_WARPS; ++step) {
        if (step + 1 < KEY_WARPS) load(step + 1);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const uint32_t (&r)[4] = raw[step % 2][j];  // keys 0-7 of 16 bytes and of the next 16, then keys 8-15
            if constexpr (KV_E4M3) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t v[4];
                    // Both keys of the even column, then of the odd one.
                    e4m3_to_fp16(__byte_perm(r[half], 0, 0x3120), v[0], v[1]);
                    e4m3_to_fp16(__byte_perm(r[half + 2], 0, 0x3120), v[2], v[3]);
                    add(v, step, out[j * 2 + half]);
                }
            } else {
                add(r, step, out[j]);
            }
        }
    }
}

DEVICE void rescale(const Probabilities& p, Output& out) {
    float factor[ROWS / 8][2];
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n)
        for (int i = 0; i < 2; ++i) factor[n][i] = p.factor[n * 8 + threadIdx.x % 4 * 2 + i];
#if SPARSE && KV_E4M3
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) factor[i / 2][i % 2] *= block_factor(p);
#endif
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) out[m][i / 4][i % 4] *= factor[i / 4][i % 2];
}

// ---------------------------------------------------------------- epilogue

// Exchanges a bit of the index with a bit of the lane.
template <int BIT, int LANE_BIT>
DEVICE void swap_bits(float (&v)[8]) {
    const bool upper = threadIdx.x & LANE_BIT;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i & BIT) continue;
        const float sent = upper ? v[i] : v[i | BIT];
        const float got = __shfl_xor_sync(~0u, sent, LANE_BIT);
        if (upper)
            v[i] = got;
        else
            v[i | BIT] = got;
    }
}

// Gathers eight neighbouring columns of row n * 8 + 2 (lane % 4) + i: those of the warp's column_group().
DEVICE void gather_row(const Output& out, int n, int i, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = out[j / 2][n][j % 2 * 2 + i];
    if constexpr (KV_E4M3) {
        swap_bits<2, 4>(v);
        swap_bits<4, 8>(v);
    } else {
        swap_bits<1, 4>(v);
        swap_bits<2, 8>(v);
        swap_bits<4, 16>(v);
    }
}

DEVICE int column_group() {
    const int eighth = threadIdx.x % 32 / 4;
    return threadIdx.x / 32 * 8 + (KV_E4M3 ? eighth % 4 * 2 + eighth / 4 : eighth);
}

// Maximum and sum of a row of the work tile.
DEVICE float2 row_statistics(const SharedStorage& shared, int row) {
    float sum = shared.sum[0][row];
    for (int w = 1; w < KEY_WARPS; ++w) sum += shared.sum[w][row];
    return make_float2(shared.maximum[row], sum);
}

// `statistics` are those of row lane % 16.
DEVICE void store_rows(const Params& p, const WorkTile& work, const float2& statistics, const Output& out) {
    // Of that row, each lane works out what all columns share.
    const int own = min(static_cast<int>(threadIdx.x % 16), work.rows - 1);
    const RowNormalisation norm =
        normalise_row(p, statistics.x, statistics.y, (work.row_tile * ROWS + own) % p.heads, output_scale(p));
    if (threadIdx.x < work.rows) write_lse(p, work, own, norm.lse);
    const int64_t own_at = row_offset(work, own, p.heads, p.out_token_stride, p.out_head_stride);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float v[8];
            gather_row(out, n, i, v);
            const int row = n * 8 + threadIdx.x % 4 * 2 + i;
            const bool exists = row < work.rows;
            const float factor = __shfl_sync(~0u, norm.factor, row);
            const int64_t at = __shfl_sync(~0u, own_at, row) + column_group() * 8;
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = pack_two(p, v[2 * j] * factor, v[2 * j + 1] * factor);
            if (exists && p.out_type != TYPE_E4M3)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            else if (exists)
                *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) + at) =
                    make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
}

// Of a row of which eight lanes have eight columns each.
DEVICE RowScale row_scale(const float (&v)[8]) {
    float magnitudes = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) magnitudes += fabsf(v[j]);
    for (int step = 4; step < 32; step *= 2) magnitudes += __shfl_xor_sync(~0u, magnitudes, step);
    return RowScale(magnitudes);
}

DEVICE void store_partial(const Params& p, const WorkTile& work, const float2& statistics, const Output& out) {
    const int slot = work.splits.slot(work.splits.index);
    if (threadIdx.x < 16) maxima_and_sums(p, slot)[row_place(threadIdx.x)] = statistics;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float low[8], high[8];
        gather_row(out, 0, i, low);
        gather_row(out, 1, i, high);
        const RowScale own[2] = {row_scale(low), row_scale(high)};
        const int row = threadIdx.x % 4 * 2 + i;
        uint2* target = static_cast<uint2*>(p.partial_out) + partial_offset(slot, column_group(), row * 4);
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            *reinterpret_cast<uint4*>(target + j) =
                make_uint4(own[0].pack(low[2 * j], low[2 * j + 1]), own[1].pack(high[2 * j], high[2 * j + 1]),
                           own[0].pack(low[2 * j + 2], low[2 * j + 3]), own[1].pack(high[2 * j + 2], high[2 * j + 3]));
        if (threadIdx.x % 32 >= 4) continue;
        for (int n = 0; n < 2; ++n) row_scales(p, slot, column_group() * 8)[row_place(row + n * 8)] = own[n].scale;
    }
}

}  // namespace paged_mla_decode
