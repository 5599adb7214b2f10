// S = Q K^T by warps, 16 rows by 16 keys each, and P = softmax, stored to shared memory.
//
// A thread has rows lane / 4 + {0, 8} of the warp's 16, and keys 2 (lane % 4) + {0, 1} of each eight.
#pragma once
#include "shared_storage.cuh"

namespace paged_mla_decode {

constexpr int K_STEPS = COLUMNS / 32;  // of an e4m3 product
using Scores = float[KEYS / 8][4];

// The thread's two rows.
struct Rows {
    int first;  // row of the tile; the other is first + 8
    uint32_t visible[2];  // bit j: the row sees key `prefix` + j; every row sees the keys before `prefix`
    float maximum[2];
    float sum[2];  // over this thread's keys

    DEVICE Rows(const Params& p, const WorkTile& work, int first_row) : first(first_row) {
        for (int i = 0; i < 2; ++i) {
            visible[i] = visible_drafts(p, work, first + 8 * i);
            maximum[i] = LOWEST;
            sum[i] = 0.f;
        }
    }
};

// Row R of a request is head R % heads of its query token R / heads; rows past the last one are zero.
DEVICE void load_queries(const Params& p, const WorkTile& work, SharedStorage& shared) {
    constexpr int CHUNKS = COLUMNS / 16;
    const uint32_t to = shared_address(shared.q);
#pragma unroll 3
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += CONSUMERS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool exists = row < work.rows;
        const bool rope = chunk * 16 >= LATENT;
        const char* source = first_query(p, 1, rope) + query_offset(p, work, exists ? row : 0, rope) + chunk * 16;
        cp_async_16_zero_fill(to + chunk / 4 * QUERY_BOX_BYTES + swizzled_offset(row, chunk % 4), source,
                              exists ? 16 : 0);
    }
    cp_async_wait_all();
    __syncthreads();
}

// Even and odd steps are added up apart: products then wait less for each other, and tensor cores that add with fewer
// bits lose less.
DEVICE void multiply_keys(const SharedStorage& shared, int stage, int row_tile, int keys, Scores& s) {
    const int lane = threadIdx.x % 32;
    const int row = row_tile * 16 + lane % 16, key = keys + lane / 16 * 8 + lane % 8;
    const uint32_t q = shared_address(shared.q) + swizzled_offset(row, lane / 16);
    const uint32_t k = shared_address(shared.kv[stage]) + swizzled_offset(key, lane / 8 % 2);
    float chain[2][KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        uint32_t a[4], b[4];
        ldmatrix_x4(a, (q ^ step % 2 * 32) + step / 2 * QUERY_BOX_BYTES);
        ldmatrix_x4(b, (k ^ step % 2 * 32) + step / 2 * KV_BOX_BYTES);
        mma_e4m3_16x8x32(chain[step % 2][0], a, b[0], b[1]);
        mma_e4m3_16x8x32(chain[step % 2][1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) s[i / 4][i % 4] = chain[0][i / 4][i % 4] + chain[1][i / 4][i % 4];
}

// Scales scores to base-2 exponents; -inf where a row does not see the key.
DEVICE void scale_and_mask(const WorkTile& work, int key, float scale, const Rows& rows, Scores& s) {
    const int first = key + threadIdx.x % 4 * 2 - (work.kv_len - work.q_len);
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const int draft = first + i / 4 * 8 + i % 2;
        const bool seen = draft < 0 || (draft < 32 && (rows.visible[i / 2 % 2] >> draft & 1));
        s[i / 4][i % 4] = seen ? s[i / 4][i % 4] * scale : -INFINITY;
    }
}

DEVICE void publish_tops(const Scores& s, const Rows& rows, float (&to)[ROWS]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1]));
        for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        if (threadIdx.x % 4 == 0) to[rows.first + 8 * i] = top;
    }
}

// Raises the maxima that a score exceeds by too much, as the other warp of these rows does; with `publishes`, the PV
// products get the factors.
DEVICE void raise_maxima(SharedStorage& shared, int row_tile, bool publishes, Rows& rows) {
    bool raised = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = rows.first + 8 * i;
        float top = shared.top[0][row];
        for (int w = 1; w < KEY_WARPS; ++w) top = fmaxf(top, shared.top[w][row]);
        const float before = rows.maximum[i];
        if (top > before + MAXIMUM_SLACK) rows.maximum[i] = top, raised = true;
        const float factor = exp2_approximate(before - rows.maximum[i]);
        rows.sum[i] *= factor;
        if (publishes && threadIdx.x % 4 == 0) shared.factor[row] = factor;
    }
    raised = __any_sync(~0u, raised);
    if (publishes && threadIdx.x % 32 == 0) shared.raised[row_tile] = raised;
}

// P = 2^(S - maximum) in fp16, as PV products read it.
DEVICE void store_probabilities(SharedStorage& shared, int row_tile, int keys, const Scores& s, Rows& rows) {
    const int lane = threadIdx.x % 32;
    uint32_t fragment[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows, then those + 8, of eight keys; then of the next eight
        const float* const two = &s[i / 2][i % 2 * 2];
        const float low = exp2_approximate(two[0] - rows.maximum[i % 2]);
        const float high = exp2_approximate(two[1] - rows.maximum[i % 2]);
        rows.sum[i % 2] += low + high;
        fragment[i] = pack_fp16(low, high);
    }
    stmatrix_x4(shared_address(shared.p) + swizzled_offset(row_tile * 16 + lane % 16, keys / 8 + lane / 16), fragment);
}

// Behind the last tile.
DEVICE void publish_statistics(SharedStorage& shared, int key_warp, const Rows& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = rows.sum[i];
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 4 > 0) continue;
        shared.top[key_warp][rows.first + 8 * i] = sum;
        if (key_warp == 0) shared.maximum[rows.first + 8 * i] = rows.maximum[i];
    }
}

}  // namespace paged_mla_decode
