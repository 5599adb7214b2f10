// Softmax for bf16 queries and an e4m3 cache: two warps, one row per thread, from scores in shared memory to P in
// shared memory. They also normalise the rows of a work tile.
#pragma once
#include "handoff.cuh"

namespace paged_mla_decode {

// P = 2^(scaled S - maximum) of a row, as the product reads it. Returns the sum.
DEVICE float exponentiate_row(uint32_t scores, uint32_t address, float scale, float maximum) {
    constexpr int CHUNKS = TILE_TOKENS / 8;
    asm volatile(""
                 : "+r"(address));  // recomputes derived addresses on every call: there are no registers to keep them
    float sum[2] = {};
    uint4 next[2] = {load_shared_uint4(scores), load_shared_uint4(scores + 16)};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint32_t own[8] = {next[0].x, next[0].y, next[0].z, next[0].w,
                                 next[1].x, next[1].y, next[1].z, next[1].w};
        if (chunk + 1 < CHUNKS)
#pragma unroll
            for (int half = 0; half < 2; ++half) next[half] = load_shared_uint4(scores + chunk * 32 + 32 + half * 16);
        uint32_t two[4];
        float e[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) e[i] = exp2_approximate(fmaf(__uint_as_float(own[i]), scale, -maximum));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            two[i] = pack_fp16(e[2 * i], e[2 * i + 1]);
            sum[i % 2] += e[2 * i] + e[2 * i + 1];
        }
        store_shared_uint4(address ^ chunk * 16, make_uint4(two[0], two[1], two[2], two[3]));
    }
    return sum[0] + sum[1];
}

DEVICE float largest_score(uint32_t scores) {
    float top = -INFINITY;
#pragma unroll 2
    for (int chunk = 0; chunk < TILE_TOKENS / 4; ++chunk) {
        const uint4 v = load_shared_uint4(scores + chunk * 16);
        top = fmaxf(top, fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)),
                               fmaxf(__uint_as_float(v.z), __uint_as_float(v.w))));
    }
    return top;
}

// Writes -inf where the row does not see the key. `first` is the draft index of the tile's first key; every row sees
// the keys before draft 0.
DEVICE void mask_scores(uint32_t scores, int first, uint32_t visible) {
#pragma unroll 1
    for (int key = max(0, -first); key < TILE_TOKENS; ++key) {
        const int draft = first + key;
        if (draft >= 32 || !(visible >> draft & 1)) store_shared_float(scores + key * 4, -INFINITY);
    }
}

// A maximum is raised when the row's 64 probabilities add up to more than MAX_SUM: then at least one of them exceeds
// the maximum by EXCESS (in base-2 exponents), which raises it.
constexpr float MAX_SUM = 512.f, EXCESS = 3.f;

DEVICE void normalise_own_row(const Params& p, const WorkTile& work, TileHandoff& to, float maximum, float sum) {
    const int row = reread_thread_index() % WARPGROUP - 32;
    const int slot = work.splits.slot(work.splits.index);
    if (row == 0) to.slot = slot, to.rows = work.rows, to.counter = work.splits.counter;
    normalise_row(p, work, to, slot, row, maximum, sum);
}

DEVICE void weigh(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const auto own_row = [] { return reread_thread_index() % WARPGROUP - 32; };
    const auto scores_of = [&](uint32_t row) { return shared_address(shared.scores) + row * SCORE_PITCH; };
    PipelineState<P_STAGES> p_state;
    uint32_t phase = 0;  // bit 0: of the next scores; bit 1: slot of the work tile's scales
    const auto publish = [&](int valid, Boundary end) { publish_tile(shared, p_state, own_row() == 0, valid, end); };
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        WorkTile& kept = shared.work[own_row() / 32];  // in registers it would cause spills
        __syncwarp();
        if (own_row() % 32 == 0) kept = work;
        __syncwarp();
        float maximum = LOWEST, sum = 0.f;
#pragma unroll 1
        for (int left = kept.key_tiles(); left > 0; --left) {
            TileHandoff& to = shared.handoff[p_state.index];
            wait_barrier(shared.scores_full, phase & 1);
            phase ^= 1;
            const int draft = (kept.last - left) * TILE_TOKENS - (kept.kv_len - kept.q_len);  // of the tile's first key
            if (draft + TILE_TOKENS > 0) mask_scores(scores_of(own_row()), draft, visible_drafts(p, kept, own_row()));
            const uint32_t row = own_row(), scores = scores_of(row);
            const float scale = shared.scale[phase >> 1][row];
            const uint32_t address = shared_address(shared.p[p_state.index]) + row * 128 + row % 8 * 16;
            wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
            float own, factor = 1.f;
#pragma unroll 1
            for (;;) {
                own = exponentiate_row(scores, address, scale, maximum);
                if (own <= MAX_SUM) break;
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
            const bool raised = __any_sync(~0u, left < kept.key_tiles() && factor != 1.f);
            if (row % 16 == 0) to.raised[row / 16] = raised;
            if (left > 1) publish(TILE_TOKENS, INSIDE);
        }
        const int steps = kept.key_tiles();
        if (steps > 0) phase ^= 2;
        if (steps == 0) wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
        normalise_own_row(p, kept, shared.handoff[p_state.index], maximum, sum);
        publish(steps > 0 ? kept.valid(kept.last - 1) : 0, kept.whole() ? END_OF_OUTPUT_TILE : END_OF_SPLIT);
    }
    wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
    publish(0, END_OF_RANGE);
}

}  // namespace paged_mla_decode
