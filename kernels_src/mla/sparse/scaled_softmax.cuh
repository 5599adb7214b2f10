// Softmax of the sparse kernel for scaled rows: two warps, from scores in shared memory to P in shared memory, as
// e4m3/softmax_warps.cuh, with as many threads for a row as there are.
//
// Values are still to be multiplied with the power of two of their key, which goes to P: with e the key's exponent, P
// is 2^(scaled S + e - maximum), the maximum that of scaled S + e, and the sum adds P 2^-e.
#pragma once
#include "../e4m3/handoff.cuh"

namespace paged_mla_decode {

constexpr int ROW_THREADS = SOFTMAX_WARPS * 32 / ROWS;
constexpr int ROW_CHUNKS = TILE_TOKENS / 8 / ROW_THREADS;  // of eight keys, of a thread: every ROW_THREADS-th

struct RowSums {
    float weights, values;  // of 2^(scaled S - maximum), and of P
};

// What a thread reads of its row's scores and of the keys' exponents, and where it writes P, from its first chunk on.
struct RowPart {
    uint32_t scores, exponents, p;
    uint32_t part;  // of the row's threads
    float scale;
};

DEVICE float sum_of_row(float x) {
    for (int step = 1; step < ROW_THREADS; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

DEVICE float largest_of_row(float x) {
    for (int step = 1; step < ROW_THREADS; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Writes the thread's P as the product reads it.
DEVICE RowSums exponentiate(const RowPart& row, float maximum) {
    uint32_t p = row.p;
    asm volatile("" : "+r"(p));  // recomputes derived addresses on every call: there are no registers to keep them
    RowSums sums[2] = {};
    uint4 next[2] = {load_shared_uint4(row.scores), load_shared_uint4(row.scores + 16)};
#pragma unroll 2
    for (int i = 0; i < ROW_CHUNKS; ++i) {
        const int chunk = i * ROW_THREADS;
        const uint32_t own[8] = {next[0].x, next[0].y, next[0].z, next[0].w,
                                 next[1].x, next[1].y, next[1].z, next[1].w};
        uint4 key[4];  // exponent and 2^-exponent, of two keys each
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) key[pair] = load_shared_uint4(row.exponents + chunk * 64 + pair * 16);
        if (i + 1 < ROW_CHUNKS)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                next[half] = load_shared_uint4(row.scores + (chunk + ROW_THREADS) * 32 + half * 16);
        uint32_t two[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float low = exp2_approximate(
                fmaf(__uint_as_float(own[2 * pair]), row.scale, __uint_as_float(key[pair].x) - maximum));
            const float high = exp2_approximate(
                fmaf(__uint_as_float(own[2 * pair + 1]), row.scale, __uint_as_float(key[pair].z) - maximum));
            two[pair] = pack_fp16(low, high);
            RowSums& sum = sums[pair % 2];
            sum.values += low + high;
            sum.weights = fmaf(low, __uint_as_float(key[pair].y), sum.weights);
            sum.weights = fmaf(high, __uint_as_float(key[pair].w), sum.weights);
        }
        store_shared_uint4(p ^ chunk * 16, make_uint4(two[0], two[1], two[2], two[3]));
    }
    return {sum_of_row(sums[0].weights + sums[1].weights), sum_of_row(sums[0].values + sums[1].values)};
}

// The largest of the row's scaled scores plus exponents.
DEVICE float largest_weight(const RowPart& row) {
    float top = -INFINITY;
#pragma unroll 1
    for (int i = 0; i < ROW_CHUNKS * 4; ++i) {
        const int pair = i / 4 * ROW_THREADS * 4 + i % 4;
        const uint4 key = load_shared_uint4(row.exponents + pair * 16);
        const float2 own = load_shared_float2(row.scores + pair * 8);
        top = fmaxf(
            top, fmaxf(fmaf(own.x, row.scale, __uint_as_float(key.x)), fmaf(own.y, row.scale, __uint_as_float(key.z))));
    }
    return largest_of_row(top);
}

// Writes -inf for the thread's keys of a tile that do not exist.
DEVICE void mask_missing(const RowPart& row, int existing) {
#pragma unroll 1
    for (int i = 0; i < ROW_CHUNKS * 8; ++i) {
        const int key = i / 8 * ROW_THREADS * 8 + i % 8;
        if (key + static_cast<int>(row.part) * 8 >= existing) store_shared_float(row.scores + key * 4, -INFINITY);
    }
}

// A maximum is raised when P of the row's 64 keys adds up to more than MAX_SUM: then at least one of them exceeds the
// maximum by EXCESS (in base-2 exponents), which raises it.
constexpr float MAX_SUM = 512.f, EXCESS = 3.f;

DEVICE void weigh(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const auto thread = [] { return reread_thread_index() % WARPGROUP - 32; };
    const auto own_row = [&] { return thread() / ROW_THREADS; };
    PipelineState<P_STAGES> p_state;
    uint32_t phase = 0, slot = 0;  // of the next scores; of the work tile's scales
    const auto publish = [&](int valid, Boundary end) { publish_tile(shared, p_state, thread() == 0, valid, end); };
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        WorkTile& kept = shared.work[thread() / 32];  // in registers it would cause spills
        __syncwarp();
        if (thread() % 32 == 0) kept = work;
        __syncwarp();
        float maximum = LOWEST, sum = 0.f;
        bool first = true;
        uint32_t tile;
#pragma unroll 1
        for (;; first = false) {
            TileHandoff& to = shared.handoff[p_state.index];
            wait_barrier(shared.scores_full, phase);
            phase ^= 1;
            const KeyScales& keys = shared.key_scales[phase];
            tile = keys.tile;
            RowPart part;
            const uint32_t row = own_row();
            part.part = thread() % ROW_THREADS;
            part.scores = shared_address(shared.scores) + row * SCORE_PITCH + part.part * 32;
            part.exponents = shared_address(keys.exponent) + part.part * 64;
            part.p = (shared_address(shared.p[p_state.index]) + row * 128 + row % 8 * 16) ^ part.part * 16;
            part.scale = shared.scale[slot][row];
            if ((tile & ~LAST_TILE) < TILE_TOKENS) mask_missing(part, tile & ~LAST_TILE);
            // 0 times the NaN that a key which does not exist may have is NaN
            const uint2 factors = thread() < (tile & ~LAST_TILE) ? keys.factors[thread()] : make_uint2(0, 0);
            wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
            to.value_factor[0][thread()] = factors.x, to.value_factor[1][thread()] = factors.x >> 16;
            to.value_factor[2][thread()] = factors.y, to.value_factor[3][thread()] = factors.y >> 16;
            RowSums own;
            float factor = 1.f;
            // All threads of a warp take part in the sums of its rows.
#pragma unroll 1
            for (;;) {
                own = exponentiate(part, maximum);
                if (!__any_sync(~0u, own.values > MAX_SUM)) break;
                const float top = largest_weight(part);
                const bool raise = own.values > MAX_SUM && top > maximum + EXCESS;
                if (raise) {
                    factor = exp2_approximate(maximum - top);
                    maximum = top;
                    sum *= factor;
                }
                if (!__any_sync(~0u, raise)) break;
            }
            __syncwarp();
            arrive_for_warp(shared.scores_empty);
            sum += own.weights;
            if (part.part == 0) to.factor[row] = factor;
            const bool raised = __any_sync(~0u, !first && factor != 1.f);
            if (thread() % 32 == 0) to.raised[thread() / 32] = raised, to.raised[2 + thread() / 32] = 0;
            if (tile & LAST_TILE) break;
            publish(TILE_TOKENS, INSIDE);
        }
        slot ^= 1;
        const int row = own_row(), split = kept.splits.slot(kept.splits.index);
        TileHandoff& to = shared.handoff[p_state.index];
        if (thread() == 0) to.slot = split, to.rows = kept.rows, to.counter = kept.splits.counter;
        if (thread() % ROW_THREADS == 0) normalise_row(p, kept, to, split, row, maximum, sum);
        publish(tile & ~LAST_TILE, kept.whole() ? END_OF_OUTPUT_TILE : END_OF_SPLIT);
    }
    wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
    publish(0, END_OF_RANGE);
}

}  // namespace paged_mla_decode
