// The arithmetic of batch-invariant attention, for prefill and decode alike: what a row's bits follow from.
//
// - A row sees its keys in tiles of SEGMENT_TILE_TOKENS from key 0 on. Scores and outputs are each one chain
//   of products in steps of 16, ascending. The tensor cores give the same bits for mma.sync and wgmma of any shape.
// - Segments end at multiples of SEGMENT_TOKENS keys. In each, maximum, sum and output start fresh. A tile raises the
//   maximum only where its largest score exceeds it by SLACK (`raised`); then `weight` rescales sum and output.
//   `probability` is before rounding what the sum adds up and rounded what the product takes.
// - The sum of a tile: for each token modulo 8, of each 32 tokens a chain of 4, these four in a chain; then the sums of
//   neighbours modulo 8 in pairs. Four sums run through a segment's tiles and are added up in pairs at its end.
// - Segments are folded from the left, in fp32 and never rounded in between.
// Keys that a row does not see have probability 0 and change nothing, so that whole tiles and segments of them may be
// skipped. Every operation is written out, because the compiler would contract products and sums in its own way.
#pragma once
#include "KernelConstants.h"
#include "wgmma.cuh"

namespace segments {

constexpr float SLACK = 8.f;  // a base-2 exponent: probabilities are at most 2^8

// A maximum of scores, before the scale, and the sum of probabilities to it.
struct Statistics {
    float maximum = -INFINITY, sum = 0.f;
};

// Scores whose scale is negative change their sign instead; 0 x -inf is NaN.
DEVICE float positive_scale(float scale) { return scale == 0.f ? 1e-30f : fabsf(scale); }

// Of a maximum of scores, which is -inf where no key was seen; `scale` is above 0.
DEVICE float anchor_of(float maximum, float scale) { return maximum == -INFINITY ? 0.f : __fmul_rn(maximum, scale); }

// The maximum of a row after a tile whose largest score is `top`: mostly the one before.
DEVICE float raised(float maximum, float top, float scale) {
    return __fmul_rn(__fsub_rn(top, maximum), scale) > SLACK ? top : maximum;
}

DEVICE float probability(float score, float scale, float anchor) {
    return exp2_approximate(__fmaf_rn(score, scale, -anchor));
}

// The factor of sums and outputs to `maximum`, where `highest` is the new maximum and `anchor` is that maximum's.
DEVICE float weight(float maximum, float highest, float scale, float anchor) {
    return maximum == highest ? 1.f : probability(maximum, scale, anchor);
}

// A sum that runs through a segment: `neighbours` are the tile's sums of two neighbouring tokens modulo 8.
DEVICE float next_sum(float sum, float factor, float even, float odd) {
    return __fmaf_rn(sum, factor, __fadd_rn(even, odd));
}

// A warpgroup's scores of a tile become probabilities; a thread has two rows 8 apart, of which s[4 j + 2 i + {0, 1}]
// are columns 8 j + 2 (lane % 4) + {0, 1} of row i. `factor` is that of sums and outputs so far: exactly 1 if the
// maximum stays.
DEVICE void exponentiate(float (&s)[SEGMENT_TILE_TOKENS / 2], float scale, float (&maximum)[2], float (&sum)[2],
                         float (&factor)[2]) {
    constexpr int CELLS = SEGMENT_TILE_TOKENS / 2, CHAIN = 16;
    float top[2], anchor[2];
    row_maxima(s, top);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float highest = raised(maximum[i], top[i], scale);
        anchor[i] = anchor_of(highest, scale);
        factor[i] = weight(maximum[i], highest, scale, anchor[i]);
        maximum[i] = highest;
    }
    float all[4];
#pragma unroll
    for (int first = 0; first < CELLS; first += CHAIN) {
        float chain[4];
#pragma unroll
        for (int i = 0; i < CHAIN; ++i) {
            float& cell = s[first + i];
            cell = probability(cell, scale, anchor[i / 2 % 2]);
            chain[i % 4] = i < 4 ? cell : __fadd_rn(chain[i % 4], cell);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) all[i] = first == 0 ? chain[i] : __fadd_rn(all[i], chain[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = next_sum(sum[i], factor[i], all[2 * i], all[2 * i + 1]);
}

// The sum of a segment, from those of the four threads of a row.
DEVICE float segment_sum(float sum) {
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
}

// The factors of what was folded so far and of the next segment.
struct Fold {
    float earlier, next;
    DEVICE float operator()(float folded, float segment) const {
        return __fmaf_rn(segment, next, __fmul_rn(folded, earlier));
    }
};

// Folds a segment's maximum into that of earlier ones; starts from -inf.
DEVICE Fold fold_maximum(float& folded, float segment, float scale) {
    const float highest = fmaxf(folded, segment), anchor = anchor_of(highest, scale);
    const Fold fold{weight(folded, highest, scale, anchor), weight(segment, highest, scale, anchor)};
    folded = highest;
    return fold;
}

// How a row of folded outputs becomes a row of the output: its factor, and the log-sum-exp in base 2.
struct Normalisation {
    float factor, lse;
};

// `sink`: null, or that of the row's head. `lse_sink`: whether the log-sum-exp includes it.
DEVICE Normalisation normalise(const Statistics& row, float scale, const float* sink, float output_scale,
                               bool lse_sink) {
    const float top = __fmul_rn(row.maximum, scale);
    Normalisation n{__fdiv_rn(1.f, row.sum), __fadd_rn(top, log2f(row.sum))};
    if (sink != nullptr) {
        const float logit = __fmul_rn(*sink, 1.44269504f);
        const float highest = fmaxf(top, logit), anchor = highest == -INFINITY ? 0.f : highest;
        const float seen = exp2f(__fsub_rn(top, anchor));
        const float total = __fmaf_rn(row.sum, seen, exp2f(__fsub_rn(logit, anchor)));
        n.factor = __fdiv_rn(seen, total);
        if (lse_sink) n.lse = __fadd_rn(highest, log2f(total));
    }
    n.factor = row.maximum > -INFINITY ? __fmul_rn(n.factor, output_scale) : 0.f;
    return n;
}

// -0 becomes +0 first: skipped tiles and computed ones differ there.
DEVICE float normalised(float folded, float factor) { return __fmul_rn(__fadd_rn(folded, 0.f), factor); }

}  // namespace segments
