// QK warpgroup for e4m3 queries: S = Q K^T, softmax, P, and what goes with it.
#pragma once
#include "handoff.cuh"
#include "../query_rows.cuh"
#include "../softmax.cuh"

namespace paged_mla_decode {

constexpr int K_STEP = 32;  // of an e4m3 product
constexpr int K_STEPS = COLUMNS / K_STEP;
constexpr int SHARED_STEPS = QUERY_BOXES * BOX_COLUMNS / K_STEP;
static_assert(SHARED_STEPS * K_STEP <= LATENT, "rope columns go to registers");
constexpr int QK_BARRIER = 2;

using Queries = uint32_t[K_STEPS - SHARED_STEPS][4];

// Row R of a request is head R % heads of its query token R / heads; rows past the last one are zero. The first columns
// go to shared memory: a thread copies 16 bytes of every STEP-th row.
DEVICE void copy_queries(const Params& p, const WorkTile& work, SharedStorage& shared) {
    constexpr int CHUNKS = QUERY_BOXES * BOX_COLUMNS / 16, STEP = WARPGROUP / CHUNKS;
    static_assert(STEP % 8 == 0);
    const int thread = threadIdx.x % WARPGROUP, chunk = thread % CHUNKS, first = thread / CHUNKS;
    const int token = (work.row_tile * ROWS + first) / p.heads;
    int head = work.row_tile * ROWS + first - token * p.heads;
    const char* const q = static_cast<const char*>(p.q);
    const char* source = q + (work.q_begin + token) * p.q_token_stride + head * p.q_head_stride + chunk * 16;
    const int64_t to_token = p.q_token_stride - p.heads * p.q_head_stride;
    const uint32_t address =
        shared_address(shared.q[chunk / 4]) + first * BOX_COLUMNS + ((chunk % 4) ^ (first / 2 % 4)) * 16;
#pragma unroll 1
    for (int row = first; row < ROWS; row += STEP) {
        const bool exists = row < work.rows;
        cp_async_16_zero_fill(address + (row - first) * BOX_COLUMNS, exists ? source : q, exists ? 16 : 0);
        source += STEP * p.q_head_stride;
        for (head += STEP; head >= p.heads; head -= p.heads) source += to_token;
    }
}

// 0 unless it `exists`.
DEVICE uint32_t load_word(const char* address, bool exists) {
    uint32_t word;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1]; }"
                 : "=r"(word)
                 : "l"(address), "r"(static_cast<uint32_t>(exists)));
    return word;
}

// The other columns go to registers.
DEVICE void load_queries(const Params& p, const WorkTile& work, SharedStorage& shared, int row, Queries& q) {
    named_barrier_sync<WARPGROUP>(QK_BARRIER);  // no warp multiplies the previous work tile's queries any more
    copy_queries(p, work, shared);
    // A quad of lanes finds where its two rows begin, and their rope columns, which may lie in other memory: each lane
    // one of the four, by the same code.
    const int lane = threadIdx.x % 32;
    int token[2], head[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int request_row = work.row_tile * ROWS + (row + 8 * half < work.rows ? row + 8 * half : 0);
        token[half] = work.q_begin + request_row / p.heads, head[half] = request_row % p.heads;
    }
    const bool second = lane % 4 >= 2, of_rope = lane % 2 > 0;
    const char* const begin = first_query(p, 1, of_rope) + query_offset(p, token[second], head[second], of_rope);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool exists = row + 8 * half < work.rows;
        const int first = lane / 4 * 4 + 2 * half;
        const char* latent = SHARED_STEPS * K_STEP < LATENT ? shuffle_pointer(begin, first) + lane % 4 * 4 : nullptr;
        const char* rope = ROPE > 0 ? shuffle_pointer(begin, first + 1) + lane % 4 * 4 : nullptr;
        asm volatile("" : "+l"(latent), "+l"(rope));  // else the compiler adds the lane to every step's offset
#pragma unroll
        for (int step = SHARED_STEPS; step < K_STEPS; ++step) {
            const char* const from = (step * K_STEP < LATENT ? latent : rope) + step * K_STEP;
            q[step - SHARED_STEPS][half] = load_word(from, exists);
            q[step - SHARED_STEPS][2 + half] = load_word(from + K_STEP / 2, exists);
        }
    }
    cp_async_wait_all();
    fence_async_proxy();
    named_barrier_sync<WARPGROUP>(QK_BARRIER);
}

// S = Q K^T over one half of the columns, still in flight on return. The halves are added in fp32: tensor cores drop
// low bits of e4m3 products, and more of them the larger the sum is.
template <int HALF>
DEVICE void multiply_keys(SharedStorage& shared, const Queries& q, const PipelineState<STAGES>& tiles, Scores& s) {
    constexpr int FIRST = HALF * (K_STEPS / 2), LAST = HALF ? K_STEPS : K_STEPS / 2;
    const uint64_t queries = k_major_descriptor<BOX_COLUMNS>(shared_address(shared.q[0]));
    const uint64_t keys = k_major_descriptor<BOX_COLUMNS>(warp_uniform(shared_address(shared.kv[tiles.index])));
    wgmma_fence();
#pragma unroll
    for (int step = FIRST; step < LAST; ++step) {
        const uint32_t offset = step / 2 * RAW_BOX_BYTES + step % 2 * K_STEP;
        const uint64_t b = advance_descriptor(keys, offset);
        if (step < SHARED_STEPS && step == FIRST)
            wgmma_e4m3<false>(s, advance_descriptor(queries, offset), b);
        else if (step < SHARED_STEPS)
            wgmma_e4m3<true>(s, advance_descriptor(queries, offset), b);
        else if (step == FIRST)
            wgmma_e4m3<false>(s, q[max(step - SHARED_STEPS, 0)], b);
        else
            wgmma_e4m3<true>(s, q[max(step - SHARED_STEPS, 0)], b);
    }
    wgmma_commit();
}

// P = 2^(scaled S - maximum), stored where the next product reads it. Returns the sums over the thread's columns.
DEVICE float2 write_probabilities(uint32_t address, const Scores& s, float scale, const Rows& rows) {
    float partial[4] = {};
    Probabilities probability;
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float low = exp2_approximate(fmaf(s[step * 8 + i], scale, -rows.maximum[i / 2 % 2]));
            const float high = exp2_approximate(fmaf(s[step * 8 + i + 1], scale, -rows.maximum[i / 2 % 2]));
            partial[i % 4] += low, partial[i % 4 + 1] += high;
            probability[step][i / 2] = pack_fp16(low, high);
        }
    }
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) stmatrix_x4(address ^ step * 32, probability[step]);
    return make_float2(partial[0] + partial[1], partial[2] + partial[3]);
}

// A maximum is raised when a thread's 16 probabilities of a row add up to more than MAX_SUM: then at least one of them
// exceeds the maximum by EXCESS (in base-2 exponents), which raises it.
constexpr float MAX_SUM = 128.f, EXCESS = 3.f;

// Raises the maxima of rows whose scores exceed them, and publishes the factors by which the PV warpgroups rescale
// their outputs.
DEVICE void raise_maxima(TileHandoff& to, int row, const Scores& s, float scale, Rows& rows) {
    float top[2];
    row_maxima(s, scale, top);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float maximum = top[i] > rows.maximum[i] + EXCESS ? top[i] : rows.maximum[i];
        const float factor = exp2_approximate(rows.maximum[i] - maximum);
        rows.maximum[i] = maximum;
        rows.sum[i] *= factor;
        if (threadIdx.x % 4 == 0) to.factor[row + 8 * i] = factor;
    }
}

// Computes the P of a tile with the maxima of earlier tiles, and once more if the sums show that a maximum must be
// raised. That is rare, and comparing maxima each time would take about as long as P.
DEVICE void publish_probabilities(SharedStorage& shared, int at, bool first, int row, const Scores& s, float scale,
                                  Rows& rows) {
    const uint32_t address = fragment_address(shared_address(shared.p[at]), 0);
    TileHandoff& to = shared.handoff[at];
    float2 sum = write_probabilities(address, s, scale, rows);
    const bool raised = __any_sync(~0u, sum.x > MAX_SUM || sum.y > MAX_SUM);
    if (raised) {
        raise_maxima(to, row, s, scale, rows);
        sum = write_probabilities(address, s, scale, rows);
    }
    rows.sum[0] += sum.x, rows.sum[1] += sum.y;
    if (threadIdx.x % 32 == 0) to.raised[threadIdx.x % WARPGROUP / 32] = raised && !first;
}

// Normalises the rows with the last tile of a work tile.
DEVICE void normalise_rows(const Params& p, const WorkTile& work, TileHandoff& to, int row, const Rows& rows) {
    const int slot = work.splits.slot(work.splits.index);
    if (threadIdx.x == CONSUMERS) to.slot = slot, to.rows = work.rows, to.counter = work.splits.counter;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = rows.sum[i];
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 4 == 0) normalise_row(p, work, to, slot, row + 8 * i, rows.maximum[i], sum);
    }
}

DEVICE void score(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int row = threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;  // the first of the thread's two
    const float given = softmax_scale_log2(p);
    const float scale = fmaxf(fabsf(given), 1e-30f);  // 0 x -inf is NaN
    PipelineState<STAGES> tiles;
    PipelineState<P_STAGES> p_state;
    const auto publish = [&](int valid, Boundary end) {
        publish_tile(shared, p_state, threadIdx.x == CONSUMERS, valid, end);
    };
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        Queries q;
        load_queries(p, work, shared, row, q);
        Rows rows;
        for (int i = 0; i < 2; ++i) {
            rows.visible[i] = visible_drafts(p, work, row + 8 * i);
            rows.maximum[i] = LOWEST;
            rows.sum[i] = 0.f;
        }
        const int last = work.first + work.key_tiles();
        Scores s, half;
        // Past the last tile the stage holds arbitrary data, and the result is not used.
        const auto begin_tile = [&](bool exists) {
            if (exists) wait_barrier(shared.full[tiles.index], tiles.phase);
            multiply_keys<0>(shared, q, tiles, half);
        };
        const auto finish_tile = [&] {
            multiply_keys<1>(shared, q, tiles, s);
            wgmma_wait<0>();
            fence_registers(half);
            fence_registers(s);
#pragma unroll
            for (int i = 0; i < TILE_TOKENS / 2; ++i) s[i] += half[i];
            arrive_for_warp(shared.empty[tiles.index]);
            tiles.advance();
        };
        if (last > work.first) {
            begin_tile(true);
            finish_tile();
        }
#pragma unroll 1
        for (int tile = work.first; tile < last; ++tile) {
            begin_tile(tile + 1 < last);
            mask_scores(work, tile, rows, given < 0.f, s);
            wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
            publish_probabilities(shared, p_state.index, tile == work.first, row, s, scale, rows);
            if (tile + 1 == last) break;
            publish(TILE_TOKENS, INSIDE);
            finish_tile();
        }
        wgmma_wait<0>();
        fence_registers(half);
        if (last == work.first) wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
        normalise_rows(p, work, shared.handoff[p_state.index], row, rows);
        publish(last > work.first ? work.valid(last - 1) : 0, work.whole() ? END_OF_OUTPUT_TILE : END_OF_SPLIT);
    }
    wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
    publish(0, END_OF_RANGE);
}

}  // namespace paged_mla_decode
