// The consumers: O^T += V^T P^T, each warp of 64 columns, and what leaves them.
#pragma once
#include "../output.cuh"
#include "layout.cuh"

namespace paged_mla_decode {

constexpr int COLUMN_TILES = 4;  // of 16 columns, in a warp
// Of rows 2 (lane % 4) + {0, 1} in two row eights. Columns lane / 4 of 16, then those 8 on; beside an e4m3 cache, whose bytes
// come in pairs, the even and the odd of 16.
using Output = float[COLUMN_TILES][2][4];

// Of the tile's keys, those past `valid` where EDGE may be NaN, and 0 x NaN is NaN: their bits become zero.
template <bool EDGE>
DEVICE void multiply_values(uint32_t values, int valid, const Probabilities& p, Output& out) {
    constexpr int LOADS = KV_E4M3 ? COLUMN_TILES / 2 : COLUMN_TILES;  // of 32 bytes of each of 16 keys
    const int lane = threadIdx.x % 32;
    uint4 b[SCORER_WARPS];
#pragma unroll
    for (int step = 0; step < SCORER_WARPS; ++step) b[step] = p.fragment[step][lane];
    uint32_t raw[2][LOADS][4];
    const auto load = [&](int step) {
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            load_matrix_x4_transposed(raw[step % 2][j], (values ^ (j * 32)) + step * 16 * ROW_BYTES);
    };
    load(0);
#pragma unroll
    for (int step = 0; step < SCORER_WARPS; ++step) {
        if (step + 1 < SCORER_WARPS) load(step + 1);
        uint32_t keep[2] = {~0u, ~0u};  // of keys 2 (lane % 4) + {0, 1}, and those 8 on
        if constexpr (EDGE) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = step * 16 + i * 8 + lane % 4 * 2;
                keep[i] = (key < valid ? 0x0000ffffu : 0u) | (key + 1 < valid ? 0xffff0000u : 0u);
            }
        }
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            uint32_t(&r)[4] = raw[step % 2][j];  // keys 0-7 of 16 bytes and of the next 16, then keys 8-15
            if constexpr (EDGE)
#pragma unroll
                for (int i = 0; i < 4; ++i) r[i] &= keep[i / 2];
            if constexpr (KV_E4M3) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t v[4];
                    // Both keys of the even column, then of the odd one.
                    e4m3_to_fp16(__byte_perm(r[half], 0, 0x3120), v[0], v[1]);
                    e4m3_to_fp16(__byte_perm(r[half + 2], 0, 0x3120), v[2], v[3]);
                    multiply(out[j * 2 + half][0], v, b[step].x, b[step].y);
                    multiply(out[j * 2 + half][1], v, b[step].z, b[step].w);
                }
            } else {
                multiply(out[j][0], r, b[step].x, b[step].y);
                multiply(out[j][1], r, b[step].z, b[step].w);
            }
        }
    }
}

DEVICE void rescale(const Probabilities& p, Output& out) {
    float factor[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
        for (int i = 0; i < 2; ++i) factor[n][i] = p.factor[n * 8 + threadIdx.x % 4 * 2 + i];
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) out[m][i / 4][i % 4] *= factor[i / 4][i % 2];
}

// ---------------------------------------------------------------- what leaves a warp

// Swaps a bit of the index with a bit of the lane.
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

// Eight neighbouring columns of row n * 8 + 2 (lane % 4) + i: those of the warp's column_group().
DEVICE void take_row(const Output& out, int n, int i, float (&v)[8]) {
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

// Maximum and sum of a row of the piece.
DEVICE float2 row_statistics(const Shared& shared, int row) {
    float sum = shared.sum[0][row];
    for (int w = 1; w < SCORER_WARPS; ++w) sum += shared.sum[w][row];
    return make_float2(shared.maximum[row], sum);
}

DEVICE void write_rows(const Params& p, const Piece& piece, const float2 (&statistics)[2][2], const Output& out) {
    const float scale = output_scale(p);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float v[8];
            take_row(out, n, i, v);
            const int wanted = n * 8 + threadIdx.x % 4 * 2 + i, row = min(wanted, max(piece.rows - 1, 0));
            const bool exists = wanted < piece.rows;
            const RowEnd end =
                end_row(p, statistics[n][i].x, statistics[n][i].y, (piece.row_tile * ROWS + row) % p.heads, scale);
            if (exists && threadIdx.x < 4) write_lse(p, piece, row, end.lse);
            const int64_t at = row_offset(piece, row, p.heads, p.out_token_stride, p.out_head_stride) + column_group() * 8;
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = pack_two(p, v[2 * j] * end.factor, v[2 * j + 1] * end.factor);
            if (exists && p.out_type != TYPE_E4M3)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            else if (exists)
                *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) + at) =
                    make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
}

// Of a row of which eight lanes have eight columns each.
DEVICE RowPower row_power(const float (&v)[8]) {
    float magnitudes = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) magnitudes += fabsf(v[j]);
    for (int step = 4; step < 32; step *= 2) magnitudes += __shfl_xor_sync(~0u, magnitudes, step);
    return RowPower(magnitudes);
}

DEVICE void write_partial(const Params& p, const Piece& piece, const float2 (&statistics)[2][2], const Output& out) {
    const int slot = slot_of(p, piece, piece.part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float low[8], high[8];
        take_row(out, 0, i, low);
        take_row(out, 1, i, high);
        const RowPower own[2] = {row_power(low), row_power(high)};
        const int row = threadIdx.x % 4 * 2 + i;
        uint2* target = static_cast<uint2*>(p.partial_out) + partial_place(slot, column_group(), row * 4);
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            *reinterpret_cast<uint4*>(target + j) =
                make_uint4(own[0].pack(low[2 * j], low[2 * j + 1]), own[1].pack(high[2 * j], high[2 * j + 1]),
                           own[0].pack(low[2 * j + 2], low[2 * j + 3]), own[1].pack(high[2 * j + 2], high[2 * j + 3]));
        if (threadIdx.x % 32 >= 4) continue;
        for (int n = 0; n < 2; ++n) {
            powers(p, slot, column_group() * 8)[row + n * 8] = own[n].power;
            if (threadIdx.x < 4) maxima_and_sums(p, slot)[row + n * 8] = statistics[n][i];
        }
    }
}

// Returns whether there were partials.
DEVICE bool consume(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t values = place_in_stage(warp * 64 * (KV_E4M3 ? 1 : 2) + lane / 8 % 2 * 16, lane / 16 * 8 + lane % 8);
    Turn<STAGES> turn;
    Turn<PLACES> place;
    uint32_t sums_parity = 0;
    int written = -1;  // counter of the last part that was written: said with the next, when the writes had time
    Walker walker(p, share);
    Piece piece;
    piece.rows = piece.first = piece.last = piece.length = piece.row_tile = piece.first_query = 0;
    piece.parts = 1;
    // While the first keys are under way, a piece without rows: the code that all else waits for in the end comes from DRAM.
#pragma unroll 1
    for (bool rehearsal = true; rehearsal || walker.next(piece); rehearsal = false) {
        Output out;
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[m][i / 4][i % 4] = 0.f;
        if (!rehearsal) turn.advance();  // the queries
        const int last = piece.first + piece.steps();
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            const Probabilities& own = shared.p[place.index];
            wait_barrier(shared.p_full[place.index], place.parity);
            wait_barrier(shared.full[turn.index], turn.parity);
            if (own.raised) rescale(own, out);
            const uint32_t stage = shared_address(shared.ring[turn.index]) + values;
            const int valid = piece.valid(tile);
            if (valid < TILE_TOKENS)
                multiply_values<true>(stage, valid, own, out);
            else
                multiply_values<false>(stage, valid, own, out);
            fence_async_proxy();  // what was read, or is being read, comes before what a copy writes there
            release(shared.empty[turn.index]);
            release(shared.p_empty[place.index]);
            turn.advance();
            place.advance();
        }
        if (!rehearsal) wait_barrier(shared.sums_full, sums_parity);
        float2 statistics[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) statistics[i / 2][i % 2] = row_statistics(shared, i / 2 * 8 + lane % 4 * 2 + i % 2);
        __threadfence_block();  // else the arrival may overtake these loads
        if (!rehearsal) release(shared.sums_empty), sums_parity ^= 1;
        if (piece.whole()) {
            write_rows(p, piece, statistics, out);
        } else {
            if (written >= 0) {
                named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
                arrive(p, written);
            }
            write_partial(p, piece, statistics, out);
            written = piece.counter;
        }
    }
    if (written < 0) return false;
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    arrive(p, written);
    return true;
}

}  // namespace paged_mla_decode
