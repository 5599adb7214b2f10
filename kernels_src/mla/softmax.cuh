// Softmax of the warpgroup kernels: masks, row maxima and sums, and P as the next product reads it.
#pragma once
#include "warpgroups.cuh"

namespace paged_mla_decode {

using Scores = float[TILE_TOKENS / 2];
using Probabilities = uint32_t[TILE_TOKENS / 16][4];

// The thread's two rows.
struct Rows {
    uint32_t visible[2];  // bit j: the row sees key `prefix` + j; every row sees the keys before `prefix`
    float maximum[2];
    float sum[2];  // over this warpgroup's tiles and this thread's columns
};

// Gives scores the sign of the scale, and -inf where a row does not see the key.
DEVICE void mask_scores(const WorkTile& work, int tile, const Rows& rows, bool negative, Scores& s) {
    const int prefix = work.kv_len - work.q_len;
    const int first = tile * TILE_TOKENS + threadIdx.x % 4 * 2;
    if (negative)
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / 2; ++i) s[i] = -s[i];
    if ((tile + 1) * TILE_TOKENS > prefix) {
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / 2; ++i) {
            const int draft = first + i / 4 * 8 + i % 2 - prefix;
            const bool seen = draft < 0 || (draft < 32 && (rows.visible[i / 2 % 2] >> draft & 1));
            if (!seen) s[i] = -INFINITY;
        }
    }
}

// The largest score of each row, scaled.
DEVICE void row_maxima(const Scores& s, float scale, float (&top)[2]) {
    ::row_maxima(s, top);
    for (int i = 0; i < 2; ++i) top[i] *= scale;
}

DEVICE float next_maximum(float maximum, float top) { return top > maximum + MAXIMUM_SLACK ? top : maximum; }

DEVICE uint32_t fragment_address(uint32_t box, int step) {
    const int row = threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 16;
    return box + row * 128 + ((step * 2 + threadIdx.x % 32 / 16) ^ (row % 8)) * 16;
}

}  // namespace paged_mla_decode
