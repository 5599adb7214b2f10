// PV warpgroups of the kernels for an e4m3 cache: O^T += V^T P^T, and the stores of O.
#pragma once
#include "../epilogue.cuh"
#include "shared_storage.cuh"

namespace paged_mla_decode {

constexpr int CHUNK = 16;  // columns that a warp gives to a product; the four warps of a warpgroup make 64
constexpr int WARP_COLUMNS = HALF_COLUMNS / (WARPGROUP / 32);
constexpr int CHUNK_PAIRS = WARP_COLUMNS / CHUNK / 2;
constexpr int PRODUCTS = TILE_TOKENS / 16 * CHUNK_PAIRS * 2;
constexpr int IN_FLIGHT = 3;
constexpr int CELLS = ROWS / 2;  // of a chunk, of a thread

// A thread has columns 2 (lane / 4) + {0, 1} of each chunk and rows 8 j + 2 (lane % 4) + {0, 1}:
// out[chunk * CELLS + 4 j + 2 * column + row].
constexpr int OUTPUTS = CHUNK_PAIRS * 2 * CELLS;
using Output = float[OUTPUTS];

#if SPARSE
DEVICE uint32_t lane_offset_in_tile() {
    return threadIdx.x % 16 * KEY_PITCH + threadIdx.x / 32 * WARP_COLUMNS + threadIdx.x / 16 % 2 * CHUNK;
}

// `lane_offset` is that in the stage of the group's keys.
DEVICE void load_values(uint32_t (&raw)[4], uint32_t lane_offset, int group) {
    ldmatrix_x4_trans(raw, lane_offset + group % CHUNK_PAIRS * 2 * CHUNK);
}
#else
// The offset of the lane's row of four 8 x 8 matrices: 16 tokens of the warp's first chunk, then of the second.
DEVICE uint32_t lane_offset_in_tile() {
    const int lane = threadIdx.x % 32, token = lane % 16;
    const int column = threadIdx.x / 32 * WARP_COLUMNS, chunk = column % BOX_COLUMNS / CHUNK + lane / 16;
    return (FIRST_VALUE_BOX + column / BOX_COLUMNS) * RAW_BOX_BYTES + token * BOX_COLUMNS +
           (chunk ^ (token / 2 % 4)) * CHUNK;
}

// Pairs of columns of two tokens.
DEVICE void load_values(uint32_t (&raw)[4], uint32_t lane_offset, int group) {
    const int step = group / CHUNK_PAIRS, pair = group % CHUNK_PAIRS;
    ldmatrix_x4_trans(raw, (lane_offset ^ pair * 2 * CHUNK) + step * 16 * BOX_COLUMNS);
}
#endif

// Tokens past the length may hold NaN, and 0 x NaN is NaN.
DEVICE void clear_values(uint32_t (&raw)[4], int valid) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int kept = valid - threadIdx.x % 4 * 2 - i % 2 * 8;
        raw[i] &= kept > 1 ? ~0u : (kept == 1 ? 0xffffu : 0u);
    }
}

// Converts to fp16, and from pairs of columns to pairs of tokens.
DEVICE void convert_values(const uint32_t (&raw)[4], int chunk, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) e4m3_to_fp16(__byte_perm(raw[2 * chunk + i], 0, 0x3120), a[2 * i], a[2 * i + 1]);
}

// Rescales those 16 rows among which a maximum was raised.
DEVICE void rescale(const TileHandoff& from, Output& out) {
    const uint4 found = *reinterpret_cast<const uint4*>(from.raised);
    const uint32_t raised[4] = {found.x, found.y, found.z, found.w};
    if (!__any_sync(~0u, (found.x | found.y | found.z | found.w) != 0)) return;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        float2 factor = *reinterpret_cast<const float2*>(&from.factor[8 * j + threadIdx.x % 4 * 2]);
        if (!SCALED && !raised[j / 2]) factor = make_float2(1.f, 1.f);
#pragma unroll
        for (int i = 0; i < OUTPUTS; i += CELLS) {
            out[i + 4 * j] *= factor.x, out[i + 4 * j + 2] *= factor.x;
            out[i + 4 * j + 1] *= factor.y, out[i + 4 * j + 3] *= factor.y;
        }
    }
}

DEVICE void load_first_values(SharedStorage& shared, const PipelineState<STAGES>& tiles, uint32_t lane_offset,
                              uint32_t (&raw)[4]) {
    wait_barrier(shared.full[tiles.index], tiles.phase);
    load_values(raw, lane_offset + shared_address(shared.kv[tiles.index]), 0);
}

// The columns of `chunk` of each warp.
DEVICE void multiply(Output& out, int chunk, const uint32_t (&a)[4], uint64_t p) {
    if (chunk == 0) wgmma<true, false, true, 0, ROWS>(out, a, p);
    if (chunk == 1) wgmma<true, false, true, ROWS, ROWS>(out, a, p);
    if constexpr (CHUNK_PAIRS > 1) {
        if (chunk == 2) wgmma<true, false, true, 2 * ROWS, ROWS>(out, a, p);
        if (chunk == 3) wgmma<true, false, true, 3 * ROWS, ROWS>(out, a, p);
    }
}

#if SPARSE
// Of the warp's columns, for a thread's keys 2 (lane % 4) + {0, 1} of 16 and those + 8.
DEVICE void load_value_factors(const TileHandoff& from, int step, uint32_t (&factors)[2]) {
    const uint16_t* of = from.value_factor[threadIdx.x / 32 * WARP_COLUMNS / 128] + step * 16 + threadIdx.x % 4 * 2;
    factors[0] = *reinterpret_cast<const uint32_t*>(of);
    factors[1] = *reinterpret_cast<const uint32_t*>(of + 8);
}

// Computes one tile, whose first values are loaded; if `more`, loads the next tile's first values. The stage of P stays
// in use.
DEVICE void multiply_tile(SharedStorage& shared, PipelineState<STAGES>& tiles, const TileHandoff& handoff, uint64_t p,
                          uint32_t lane_offset, int valid, bool more, uint32_t (&raw)[4], Output& out) {
    uint32_t a[IN_FLIGHT][4], factors[2];
    uint32_t from = lane_offset + shared_address(shared.kv[tiles.index]);
    fence_registers(out);
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        const int group = i / 2, step = group / CHUNK_PAIRS;
        uint32_t (&own)[4] = a[i % IN_FLIGHT];
        if (i % (2 * CHUNK_PAIRS) == 0) load_value_factors(handoff, step, factors);
        if (i >= IN_FLIGHT) wgmma_wait<IN_FLIGHT - 1>();
        if (i % 2 == 0 && valid < TILE_TOKENS) clear_values(raw, valid - step * 16);
        convert_values(raw, i % 2, own);
#pragma unroll
        for (int j = 0; j < 4; ++j) own[j] = multiply_fp16(own[j], factors[j / 2]);
        if (i % 2 == 1 && i + 1 < PRODUCTS) {
            if ((group + 1) % CHUNK_PAIRS == 0) {
                fence_async_proxy();  // orders the reads before the copies that reuse the stage
                arrive_for_warp(shared.empty[tiles.index]);
                tiles.advance();
                wait_barrier(shared.full[tiles.index], tiles.phase);
                from = lane_offset + shared_address(shared.kv[tiles.index]);
            }
            load_values(raw, from, group + 1);
        }
        wgmma_fence();
        multiply(out, i % (2 * CHUNK_PAIRS), own, advance_descriptor(p, step * 32));
        wgmma_commit();
    }
    fence_async_proxy();
    arrive_for_warp(shared.empty[tiles.index]);
    tiles.advance();
    if (more) load_first_values(shared, tiles, lane_offset, raw);
    wgmma_wait<0>();
    fence_registers(out);
}
#else
// Computes one tile, whose first values are loaded; if `more`, loads the next tile's first values. The stage of P stays
// in use.
DEVICE void multiply_tile(SharedStorage& shared, PipelineState<STAGES>& tiles, uint64_t p, uint32_t lane_offset,
                          int valid, bool more, uint32_t (&raw)[4], Output& out) {
    uint32_t a[IN_FLIGHT][4];
    const uint32_t from = lane_offset + shared_address(shared.kv[tiles.index]);
    fence_registers(out);
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        const int group = i / 2, step = group / CHUNK_PAIRS;
        if (i >= IN_FLIGHT) wgmma_wait<IN_FLIGHT - 1>();
        if (i % 2 == 0 && valid < TILE_TOKENS) clear_values(raw, valid - step * 16);
        convert_values(raw, i % 2, a[i % IN_FLIGHT]);
        if (i % 2 == 1 && i + 1 < PRODUCTS) load_values(raw, from, group + 1);
        wgmma_fence();
        multiply(out, i % (2 * CHUNK_PAIRS), a[i % IN_FLIGHT], advance_descriptor(p, step * 32));
        wgmma_commit();
    }
    fence_async_proxy();  // orders the reads before the TMA write that reuses the stage
    arrive_for_warp(shared.empty[tiles.index]);
    tiles.advance();
    if (more) load_first_values(shared, tiles, lane_offset, raw);
    wgmma_wait<0>();
    fence_registers(out);
}
#endif

// Eight lanes hold 16 neighbouring columns of a row.
DEVICE void store_rows(const Params& p, const TileHandoff& from, const Output& out) {
    const int lane = threadIdx.x % 32;
    const int column = threadIdx.x / 32 * WARP_COLUMNS + lane / 4 * 2;
    if (PADDED && column >= LATENT) return;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 8 * j + lane % 4 * 2 + i;
            const float factor = from.factor_out[row];
            const int64_t at = from.offset_out[row] + column;
            if (at < column) continue;
#pragma unroll
            for (int chunk = 0; chunk < WARP_COLUMNS / CHUNK; ++chunk) {
                const int first = chunk * CELLS + 4 * j + i;
                const uint32_t two = pack_two(p, out[first] * factor, out[first + 2] * factor);
                if (p.out_type != TYPE_E4M3)
                    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + chunk * CHUNK) = two;
                else
                    *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + at + chunk * CHUNK) = two;
            }
        }
}

// The scale of row 8 eight + 2 (lane % 4) + i, of which eight lanes have the warp's columns.
DEVICE RowScale row_scale(const Output& out, int eight, int i) {
    float magnitudes = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < WARP_COLUMNS / CHUNK; ++chunk)
        for (int column = 0; column < 2; ++column) magnitudes += fabsf(out[chunk * CELLS + 4 * eight + 2 * column + i]);
    for (int step = 4; step < 32; step *= 2) magnitudes += __shfl_xor_sync(~0u, magnitudes, step);
    return RowScale(magnitudes);
}

// Stores in the order in which the merge reads: a lane has two columns of rows lane / 4 and + 8.
DEVICE void store_partial(const Params& p, const TileHandoff& from, const Output& out) {
    const int thread = reread_thread_index();
    const int lane = thread % 32, column = thread / 32 * WARP_COLUMNS;
    if (PADDED && column >= LATENT) return;
    uint2* target = static_cast<uint2*>(p.partial_out);
    target += partial_offset(from.slot, column / 8 + lane / 16, lane % 4 * 8 + lane / 4 % 4);
    float* scales = row_scales(p, from.slot, column) + row_place(lane % 4 * 2);
#pragma unroll
    for (int rows = 0; rows < ROWS / 16; ++rows) {
        if (rows * 16 >= from.rows) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const RowScale low = row_scale(out, 2 * rows, i), high = row_scale(out, 2 * rows + 1, i);
            if (lane < 4)
                scales[row_place(rows * 16 + i)] = low.scale, scales[row_place(rows * 16 + 8 + i)] = high.scale;
#pragma unroll
            for (int chunk = 0; chunk < WARP_COLUMNS / CHUNK; ++chunk) {
                const float* const own = &out[chunk * CELLS + 8 * rows + i];
                target[chunk * 4 * ROWS + rows * 32 + i * 4] =
                    make_uint2(low.pack(own[0], own[2]), high.pack(own[4], own[6]));
            }
        }
    }
}

// Returns whether there were partials.
DEVICE bool multiply_values(const Params& p, SharedStorage& shared) {
    // counter of the latest partial; its arrival is published with the next one, when the stores had time
    int written = -1;
    PipelineState<STAGES> tiles;
    PipelineState<P_STAGES> p_state;
    const uint32_t lane_offset = lane_offset_in_tile();
    for (;;) {
        Output out;
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i) out[i] = 0.f;
        uint32_t raw[4];
        Boundary end = INSIDE;
        for (bool first = true;; first = false) {
            wait_barrier(shared.p_full[p_state.index], p_state.phase);
            const TileHandoff& from = shared.handoff[p_state.index];
            const int valid = from.valid;
            end = from.end;
            if (SCALED ? end != END_OF_RANGE : valid > 0) {
                if (first) load_first_values(shared, tiles, lane_offset, raw);
                rescale(from, out);
                const uint64_t probabilities =
                    k_major_descriptor(warp_uniform(shared_address(shared.p[p_state.index])));
#if SPARSE
                multiply_tile(shared, tiles, from, probabilities, lane_offset, valid, end == INSIDE, raw, out);
#else
                multiply_tile(shared, tiles, probabilities, lane_offset, valid, end == INSIDE, raw, out);
#endif
            }
            if (end != INSIDE) break;
            arrive_for_warp(shared.p_empty[p_state.index]);
            p_state.advance();
        }
        const TileHandoff& from = shared.handoff[p_state.index];
        if (end == END_OF_RANGE) break;
        if (end == END_OF_OUTPUT_TILE) {
            store_rows(p, from, out);
        } else {
            if (written >= 0) {
                named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
                arrive(p, written);
            }
            store_partial(p, from, out);
            written = from.counter;
        }
        __syncwarp();
        arrive_for_warp(shared.p_empty[p_state.index]);
        p_state.advance();
    }
    if (written < 0) return false;
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    arrive(p, written);
    return true;
}

}  // namespace paged_mla_decode
