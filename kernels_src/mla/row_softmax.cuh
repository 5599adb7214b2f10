// Softmax beside bf16 queries and an e4m3 cache: by two warps, a row each thread, from scores in shared memory to P there. They
// also know what becomes of the rows of a piece.
#pragma once
#include "handing.cuh"

namespace paged_mla_decode {

// P = 2^(scaled S - maximum) of a row, as the product reads it. Returns the sum.
DEVICE float weigh_row(uint32_t scores, uint32_t place, float scale, float maximum) {
    constexpr int CHUNKS = TILE_TOKENS / 8;
    asm volatile("" : "+r"(place));  // what follows from it is not held from call to call: there are no registers for that
    float sum[2] = {};
    uint4 next[2] = {load_shared_16_bytes(scores), load_shared_16_bytes(scores + 16)};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint32_t own[8] = {next[0].x, next[0].y, next[0].z, next[0].w, next[1].x, next[1].y, next[1].z, next[1].w};
        if (chunk + 1 < CHUNKS)
#pragma unroll
            for (int half = 0; half < 2; ++half) next[half] = load_shared_16_bytes(scores + chunk * 32 + 32 + half * 16);
        uint32_t two[4];
        float e[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) e[i] = exp2_approximate(fmaf(__uint_as_float(own[i]), scale, -maximum));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            two[i] = pack_fp16(e[2 * i], e[2 * i + 1]);
            sum[i % 2] += e[2 * i] + e[2 * i + 1];
        }
        store_shared_16_bytes(place ^ chunk * 16, make_uint4(two[0], two[1], two[2], two[3]));
    }
    return sum[0] + sum[1];
}

DEVICE float largest_score(uint32_t scores) {
    float top = -INFINITY;
#pragma unroll 2
    for (int chunk = 0; chunk < TILE_TOKENS / 4; ++chunk) {
        const uint4 v = load_shared_16_bytes(scores + chunk * 16);
        top = fmaxf(top, fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w))));
    }
    return top;
}

// -inf where the row does not see the key. Draft `first` is the tile's first key; keys before draft 0 all rows see.
DEVICE void hide_scores(uint32_t scores, int first, uint32_t visible) {
#pragma unroll 1
    for (int key = max(0, -first); key < TILE_TOKENS; ++key) {
        const int draft = first + key;
        if (draft >= 32 || !(visible >> draft & 1))
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(scores + key * 4), "f"(-INFINITY) : "memory");
    }
}

// A maximum follows when the row's 64 probabilities add up to more than that: then one of them, at least, exceeds the maximum
// by the excess (of base-2 exponents) that makes it follow.
constexpr float MOST_SUM = 512.f, EXCESS = 3.f;

DEVICE void end_row_of(const Params& p, const Piece& piece, Handover& to, float maximum, float sum) {
    const int row = thread_anew() % WARPGROUP - 32;
    const int slot = slot_of(p, piece, piece.part);
    if (row == 0) to.slot = slot, to.rows = piece.rows, to.counter = piece.counter;
    end_row(p, piece, to, slot, row, maximum, sum);
}

DEVICE void weigh(const Params& p, const Share& share, Shared& shared) {
    const auto own_row = [] { return thread_anew() % WARPGROUP - 32; };
    const auto scores_of = [&](uint32_t row) { return shared_address(shared.scores) + row * SCORE_PITCH; };
    Turn<HANDOVERS> handovers;
    uint32_t phase = 0;  // bit 0: of the next scores; bit 1: slot of the piece's factors
    const auto hand_over = [&](int valid, End end) { hand_tile(shared, handovers, own_row() == 0, valid, end); };
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        Piece& kept = shared.piece[own_row() / 32];  // in registers it would cost spills
        __syncwarp();
        if (own_row() % 32 == 0) kept = piece;
        __syncwarp();
        float maximum = LOWEST, sum = 0.f;
#pragma unroll 1
        for (int left = kept.steps(); left > 0; --left) {
            Handover& to = shared.handover[handovers.index];
            wait_barrier(shared.scores_full, phase & 1);
            phase ^= 1;
            const int draft = (kept.last - left) * TILE_TOKENS - (kept.length - kept.queries);  // of the tile's first key
            if (draft + TILE_TOKENS > 0) hide_scores(scores_of(own_row()), draft, visible_drafts(p, kept, own_row()));
            const uint32_t row = own_row(), scores = scores_of(row);
            const float scale = shared.scale[phase >> 1][row];
            const uint32_t place = shared_address(shared.p[handovers.index]) + row * 128 + row % 8 * 16;
            wait_barrier(shared.p_empty[handovers.index], handovers.parity ^ 1);
            float own, factor = 1.f;
#pragma unroll 1
            for (;;) {
                own = weigh_row(scores, place, scale, maximum);
                if (own <= MOST_SUM) break;
                const float top = largest_score(scores) * scale;
                if (!(top > maximum + EXCESS)) break;
                factor = exp2_approximate(maximum - top);
                maximum = top;
                sum *= factor;
            }
            __syncwarp();
            arrive_for_warp(shared.scores_empty);
            sum += own;
            to.factor[row] = factor;
            const bool grown = __any_sync(~0u, left < kept.steps() && factor != 1.f);
            if (row % 16 == 0) to.grown[row / 16] = grown;
            if (left > 1) hand_over(TILE_TOKENS, NOTHING_ENDS);
        }
        const int steps = kept.steps();
        if (steps > 0) phase ^= 2;
        if (steps == 0) wait_barrier(shared.p_empty[handovers.index], handovers.parity ^ 1);
        end_row_of(p, kept, shared.handover[handovers.index], maximum, sum);
        hand_over(steps > 0 ? kept.valid(kept.last - 1) : 0, kept.whole() ? WHOLE_PIECE_ENDS : PART_ENDS);
    }
    wait_barrier(shared.p_empty[handovers.index], handovers.parity ^ 1);
    hand_over(0, ALL_ENDS);
}

}  // namespace paged_mla_decode
