// Softmax of the sparse kernel in CTA groups, for scaled rows: in registers of the QK warpgroup, from S^T to P in
// shared memory.
//
// Values are still to be multiplied with the power of two of their key, which goes to P: with e the key's exponent, P
// is 2^(scaled S + e - maximum), the maximum that of scaled S + e, and the sum adds P 2^-e.
#pragma once
#include "../e4m3/handoff.cuh"

namespace paged_mla_decode {

// A thread has keys lane / 4 + {0, 8} of its warp's 16, and rows 8 j + 2 (lane % 4) + {0, 1}:
// s[4 j + 2 * key + row], sums[2 j + row].
using KeyScores = float[ROWS / 2];
using RowSums = float[ROWS / 4];
using PairedWeights = uint32_t[ROWS / 4];  // P in fp16, of two rows: p[2 j + key]

// When a P exceeds MAX_P, the maxima are raised that a row exceeds by more than EXCESS (in base-2 exponents).
constexpr uint32_t MAX_P = 0x5c00;  // 256 in fp16
constexpr float EXCESS = 3.f;

// Of a key: the exponent, and 2 to it and to the negative one.
struct KeyUnit {
    float exponent, power, inverse;

    DEVICE explicit KeyUnit(int e) : exponent(e), power(power_of_two(e)), inverse(power_of_two(-e)) {}
    DEVICE float excess(float score, float scale, float maximum) const {
        return fmaf(score, scale * power, exponent - maximum);
    }
};

DEVICE const RowPair& row_pair(const SharedStorage& shared, int j) { return shared.rows[j * 4 + threadIdx.x % 4]; }

// Computes P and its sums over the thread's keys; whether any exceeds MAX_P.
DEVICE bool exponentiate(const KeyScores& s, const KeyUnit (&keys)[2], const SharedStorage& shared, PairedWeights& p,
                         RowSums& sums) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const RowPair rows = row_pair(shared, j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float weight[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                weight[row] =
                    exp2_approximate(keys[i].excess(s[4 * j + 2 * i + row], rows.scale[row], rows.maximum[row]));
                float& sum = sums[2 * j + row];
                sum = i == 0 ? weight[row] * keys[i].inverse : fmaf(weight[row], keys[i].inverse, sum);
            }
            p[2 * j + i] = pack_fp16(weight[0], weight[1]);
            largest = __vmaxu2(largest, p[2 * j + i]);  // these are not negative, and so ordered like integers
        }
    }
    return max(largest & 0xffff, largest >> 16) > MAX_P;
}

// Combines what the lanes have of a row, number i of RowSums, and stores it as the warp's.
template <class Combine>
DEVICE void combine_lanes(float part, int i, int thread, SharedStorage& shared, Combine combine) {
    const int lane = thread % 32;
    for (int other = 4; other < 32; other *= 2) part = combine(part, __shfl_xor_sync(~0u, part, other));
    if (lane < 4) shared.row_parts[thread / 32][i / 2 * 8 + lane * 2 + i % 2] = part;
}

// Raises the maxima of a tile's rows, and rescales the sums so far.
DEVICE void raise_maxima(const KeyScores& s, const KeyUnit (&keys)[2], SharedStorage& shared, TileHandoff& to,
                         RowSums& sums) {
    const int thread = reread_thread_index() % WARPGROUP, lane = thread % 32;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const RowPair rows = row_pair(shared, j);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float top = fmaxf(keys[0].excess(s[4 * j + row], rows.scale[row], 0.f),
                                    keys[1].excess(s[4 * j + 2 + row], rows.scale[row], 0.f));
            combine_lanes(top, 2 * j + row, thread, shared, [](float a, float b) { return fmaxf(a, b); });
        }
    }
    named_barrier_sync<WARPGROUP>(QK_BARRIER);
    if (thread < ROWS) {
        float top = shared.row_parts[0][thread];
        for (int warp = 1; warp < WARPGROUP / 32; ++warp) top = fmaxf(top, shared.row_parts[warp][thread]);
        float& maximum = shared.rows[thread / 2].maximum[thread % 2];
        const bool raises = top > maximum + EXCESS;
        to.factor[thread] = raises ? exp2_approximate(maximum - top) : 1.f;
        if (raises) maximum = top;
    }
    named_barrier_sync<WARPGROUP>(QK_BARRIER);
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
        for (int row = 0; row < 2; ++row) sums[2 * j + row] *= to.factor[8 * j + lane % 4 * 2 + row];
}

// Stores P as the product reads it: of each row the keys of a warp are two pieces of 16 bytes.
DEVICE void store_weights(uint32_t box, const PairedWeights& p) {
    const int thread = reread_thread_index() % WARPGROUP, row = thread % 8, matrix = thread % 32 / 8;
    const uint32_t to = box + (matrix / 2 * 8 + row) * 128 + ((thread / 32 * 2 + matrix % 2) ^ row) * 16;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j += 2)
        stmatrix_x4_trans(to + j * 8 * 128, {p[2 * j], p[2 * j + 1], p[2 * j + 2], p[2 * j + 3]});
}

// Gives scores of keys of a tile that do not exist -inf: their rows hold arbitrary bytes.
DEVICE void mask_missing(KeyScores& s, int key, int existing) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i)
        if (key + i / 2 % 2 * 8 >= existing) s[i] = -INFINITY;
}

// Publishes how rows become rows of the output, or their statistics, at the end of a work tile.
DEVICE void normalise_rows(const Params& p, const WorkTile& work, SharedStorage& shared, TileHandoff& to,
                           const RowSums& sums) {
    const int thread = reread_thread_index() % WARPGROUP;
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i)
        combine_lanes(sums[i], i, thread, shared, [](float a, float b) { return a + b; });
    named_barrier_sync<WARPGROUP>(QK_BARRIER);
    const int split = work.splits.slot(work.splits.index);
    if (thread == 0) to.slot = split, to.rows = work.rows, to.counter = work.splits.counter;
    if (thread < ROWS) {
        float sum = 0.f;
        for (int warp = 0; warp < WARPGROUP / 32; ++warp) sum += shared.row_parts[warp][thread];
        normalise_row(p, work, to, split, thread, shared.rows[thread / 2].maximum[thread % 2], sum);
    }
}

}  // namespace paged_mla_decode
