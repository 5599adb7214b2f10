// Masks, row maxima and sums, and P as the next product reads it.
#pragma once
#include "config.cuh"

namespace context_attention {

using Scores = float[TILE_TOKENS / 2];
using Probabilities = uint32_t[TILE_TOKENS / 16][4];

// The thread's two rows, 8 apart.
struct Rows {
    int begin[2], end[2];  // the keys that it sees
    float maximum[2];  // of scores before the scale
    float sum[2];  // of this thread's columns
};

// The factor of scores in the exponent of 2, after what `adjust` does to them.
struct Scale {
    float log2;  // above 0
    float inner;  // with a soft cap: factor in front of tanh; else negative where scores change their sign
};

DEVICE float log2_scale(const Params& p) {
    float log2 = p.softmax_scale_log2;
    if (p.softmax_scale_device != nullptr) log2 *= *static_cast<const float*>(p.softmax_scale_device);
    return log2;
}

DEVICE Scale scale_of(const Params& p, float log2) {
#if SOFT_CAP
    // tanh(x) = 1 - 2 / (2^(2 x log2(e)) + 1); log2 has the factor log2(e) already
    return {p.soft_cap * 1.44269504f, 2.f * log2 / p.soft_cap};
#else
    return {segments::positive_scale(log2), log2};
#endif
}

DEVICE float reciprocal_approximate(float x) {  // of infinity: 0
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE void adjust(Scores& s, const Scale& scale) {
#if SOFT_CAP
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 2; ++i)
        s[i] = fmaf(-2.f, reciprocal_approximate(1.f + exp2_approximate(s[i] * scale.inner)), 1.f);
#else
    if (scale.inner < 0.f)
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / 2; ++i) s[i] = -s[i];
#endif
}

// -inf where a row does not see the key. `all_see`: the keys of the tiles that need no mask.
DEVICE void mask(Scores& s, const Rows& rows, int tile, int2 all_see) {
    const int token = tile * TILE_TOKENS, column = token + threadIdx.x % 4 * 2;
    if (token + TILE_TOKENS > all_see.y) {
        const int end[2] = {rows.end[0] - column, rows.end[1] - column};
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / 2; ++i)
            if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) s[i] = -INFINITY;
    }
    if (token < all_see.x) {
        const int begin[2] = {rows.begin[0] - column, rows.begin[1] - column};
#pragma unroll
        for (int i = 0; i < TILE_TOKENS / 2; ++i)
            if (i / 4 * 8 + i % 2 < begin[i / 2 % 2]) s[i] = -INFINITY;
    }
}

// Scores become probabilities to the row maxima so far; `factor` is that of earlier sums and outputs. For a tile that a
// row does not see, the factor is exactly 1 and the probabilities are 0.
DEVICE void exponentiate(Scores& s, const Scale& scale, Rows& rows, float (&factor)[2]) {
#if SEGMENTS
    segments::exponentiate(s, scale.log2, rows.maximum, rows.sum, factor);
#else
    float top[2], anchor[2];
    row_maxima(s, top);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float highest = fmaxf(top[i], rows.maximum[i]);
        anchor[i] = highest == -INFINITY ? 0.f : highest * scale.log2;
        factor[i] = highest == rows.maximum[i] ? 1.f : exp2_approximate(fmaf(rows.maximum[i], scale.log2, -anchor[i]));
        rows.maximum[i] = highest;
    }
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 2; ++i) {
        s[i] = exp2_approximate(fmaf(s[i], scale.log2, -anchor[i / 2 % 2]));
        sum[i % 4] += s[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.sum[i] = fmaf(rows.sum[i], factor[i], sum[2 * i] + sum[2 * i + 1]);
#endif
}

DEVICE void pack(const Scores& s, Probabilities& probability) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 2; i += 2)
        probability[i / 8][i / 2 % 4] = MMA_FP16 ? pack_fp16(s[i], s[i + 1]) : pack_bf16(s[i], s[i + 1]);
}

}  // namespace context_attention
