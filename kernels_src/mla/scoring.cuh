// The scoring warpgroup of the kernel for e4m3 queries: S = Q K^T, softmax, P and what the others need to know of the rows.
#pragma once
#include "handing.cuh"
#include "softmax.cuh"

namespace paged_mla_decode {

constexpr int DEPTH_STEP = 32;  // of an e4m3 product
constexpr int DEPTH_STEPS = COLUMNS / DEPTH_STEP;
constexpr int SHARED_STEPS = QUERY_BOXES * BOX_COLUMNS / DEPTH_STEP;
constexpr int SCORING_BARRIER = 2;

using Queries = uint32_t[DEPTH_STEPS - SHARED_STEPS][4];

// Row R of a request is head R % heads of its query token R / heads; rows past the last are zero. The first columns go to
// shared memory: a thread has 16 bytes of every eighth row.
DEVICE void copy_queries(const Params& p, const Piece& piece, Shared& shared) {
    constexpr int CHUNKS = QUERY_BOXES * BOX_COLUMNS / 16, STEP = WARPGROUP / CHUNKS;
    static_assert(STEP == 8);
    const int thread = threadIdx.x % WARPGROUP, chunk = thread % CHUNKS, first = thread / CHUNKS;
    const int token = (piece.row_tile * ROWS + first) / p.heads;
    int head = piece.row_tile * ROWS + first - token * p.heads;
    const char* const q = static_cast<const char*>(p.q);
    const char* source = q + (piece.first_query + token) * p.q_token_stride + head * p.q_head_stride + chunk * 16;
    const int64_t to_token = p.q_token_stride - p.heads * p.q_head_stride;
    const uint32_t place = shared_address(shared.q[chunk / 4]) + first * BOX_COLUMNS + ((chunk % 4) ^ (first / 2 % 4)) * 16;
#pragma unroll 1
    for (int row = first; row < ROWS; row += STEP) {
        const bool exists = row < piece.rows;
        copy_16_bytes_or_zeros(place + (row - first) * BOX_COLUMNS, exists ? source : q, exists ? 16 : 0);
        source += STEP * p.q_head_stride;
        for (head += STEP; head >= p.heads; head -= p.heads) source += to_token;
    }
}

DEVICE uint32_t load_word(const char* address) { return *reinterpret_cast<const uint32_t*>(address); }

// The others to registers.
DEVICE void load_queries(const Params& p, const Piece& piece, Shared& shared, int row, Queries& q) {
    named_barrier_sync<WARPGROUP>(SCORING_BARRIER);  // no warp multiplies the last piece's any more
    copy_queries(p, piece, shared);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + 8 * half;
        const bool exists = own < piece.rows;
        const char* source = static_cast<const char*>(p.q) + SHARED_STEPS * DEPTH_STEP + threadIdx.x % 4 * 4;
        source += row_offset(piece, exists ? own : 0, p.heads, p.q_token_stride, p.q_head_stride);
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS - SHARED_STEPS; ++step) {
            q[step][half] = exists ? load_word(source + step * DEPTH_STEP) : 0;
            q[step][2 + half] = exists ? load_word(source + step * DEPTH_STEP + DEPTH_STEP / 2) : 0;
        }
    }
    wait_for_copies();
    fence_async_proxy();
    named_barrier_sync<WARPGROUP>(SCORING_BARRIER);
}

// S = Q K^T over half of the depth, under way when this returns. The halves are added in fp32: tensor cores drop low bits of
// e4m3 products, and more of them the larger the sum is.
template <int HALF>
DEVICE void multiply_keys(Shared& shared, const Queries& q, const Turn<BUFFERS>& tiles, Scores& s) {
    constexpr int FIRST = HALF * (DEPTH_STEPS / 2), LAST = FIRST + DEPTH_STEPS / 2;
    const uint64_t queries = depth_major_operand<BOX_COLUMNS>(shared_address(shared.q[0]));
    const uint64_t keys = depth_major_operand<BOX_COLUMNS>(uniform(shared_address(shared.kv[tiles.index])));
    wgmma_fence();
#pragma unroll
    for (int step = FIRST; step < LAST; ++step) {
        const uint32_t offset = step / 2 * RAW_BOX_BYTES + step % 2 * DEPTH_STEP;
        const uint64_t b = advance_operand(keys, offset);
        if (step < SHARED_STEPS && step == FIRST)
            wgmma_e4m3<false>(s, advance_operand(queries, offset), b);
        else if (step < SHARED_STEPS)
            wgmma_e4m3<true>(s, advance_operand(queries, offset), b);
        else if (step == FIRST)
            wgmma_e4m3<false>(s, q[max(step - SHARED_STEPS, 0)], b);
        else
            wgmma_e4m3<true>(s, q[max(step - SHARED_STEPS, 0)], b);
    }
    wgmma_commit();
}

// P = 2^(scaled S - maximum), to where the next product reads it. Returns the sums over the thread's columns.
DEVICE float2 write_probabilities(uint32_t place, const Scores& s, float scale, const Rows& rows) {
    float part[4] = {};
    Probabilities probability;
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float low = exp2_approximate(fmaf(s[step * 8 + i], scale, -rows.maximum[i / 2 % 2]));
            const float high = exp2_approximate(fmaf(s[step * 8 + i + 1], scale, -rows.maximum[i / 2 % 2]));
            part[i % 4] += low, part[i % 4 + 1] += high;
            probability[step][i / 2] = pack_fp16(low, high);
        }
    }
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) store_matrix_x4(place ^ step * 32, probability[step]);
    return make_float2(part[0] + part[1], part[2] + part[3]);
}

// A maximum follows when a thread's 16 probabilities of a row add up to more than that: then one of them, at least, exceeds
// the maximum by the excess (of base-2 exponents) that makes it follow.
constexpr float MOST_SUM = 128.f, EXCESS = 3.f;

// The maxima of rows whose scores exceed them follow. The others rescale what they have by the factors.
DEVICE void raise_maxima(Handover& to, int row, const Scores& s, float scale, Rows& rows) {
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

// P of a tile: with the maxima of earlier tiles, and again where the sums tell that one has to follow. That is seldom, and to
// compare maxima each time would take about as long as P.
DEVICE void hand_probabilities(Shared& shared, int at, bool first, int row, const Scores& s, float scale, Rows& rows) {
    const uint32_t place = fragment_place(shared_address(shared.p[at]), 0);
    Handover& to = shared.handover[at];
    float2 sum = write_probabilities(place, s, scale, rows);
    const bool grown = __any_sync(~0u, sum.x > MOST_SUM || sum.y > MOST_SUM);
    if (grown) {
        raise_maxima(to, row, s, scale, rows);
        sum = write_probabilities(place, s, scale, rows);
    }
    rows.sum[0] += sum.x, rows.sum[1] += sum.y;
    if (threadIdx.x % 32 == 0) to.grown[threadIdx.x % WARPGROUP / 32] = grown && !first;
}

// With the last tile of a piece: what becomes of its rows.
DEVICE void end_rows(const Params& p, const Piece& piece, Handover& to, int row, const Rows& rows) {
    const int slot = slot_of(p, piece, piece.part);
    if (threadIdx.x == CONSUMERS) to.slot = slot, to.rows = piece.rows, to.counter = piece.counter;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = rows.sum[i];
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 4 == 0) end_row(p, piece, to, slot, row + 8 * i, rows.maximum[i], sum);
    }
}

DEVICE void score(const Params& p, const Share& share, Shared& shared) {
    const int row = threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;  // the first of the thread's two
    const float given = softmax_scale_log2(p);
    const float scale = fmaxf(fabsf(given), 1e-30f);  // 0 x -inf is NaN
    Turn<BUFFERS> tiles;
    Turn<HANDOVERS> handovers;
    const auto hand_over = [&](int valid, End end) { hand_tile(shared, handovers, threadIdx.x == CONSUMERS, valid, end); };
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        Queries q;
        load_queries(p, piece, shared, row, q);
        Rows rows;
        for (int i = 0; i < 2; ++i) {
            rows.visible[i] = visible_drafts(p, piece, row + 8 * i);
            rows.maximum[i] = LOWEST;
            rows.sum[i] = 0.f;
        }
        const int last = piece.first + piece.steps();
        Scores s, half;
        // Past the last tile there is whatever lies there, and nobody looks.
        const auto begin_tile = [&](bool exists) {
            if (exists) wait_barrier(shared.full[tiles.index], tiles.parity);
            multiply_keys<0>(shared, q, tiles, half);
        };
        const auto finish_tile = [&] {
            multiply_keys<1>(shared, q, tiles, s);
            wgmma_wait<0>();
            hold_registers(half);
            hold_registers(s);
#pragma unroll
            for (int i = 0; i < TILE_TOKENS / 2; ++i) s[i] += half[i];
            arrive_for_warp(shared.empty[tiles.index]);
            tiles.advance();
        };
        if (last > piece.first) {
            begin_tile(true);
            finish_tile();
        }
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            begin_tile(tile + 1 < last);
            mask_scores(piece, tile, rows, given < 0.f, s);
            wait_barrier(shared.p_empty[handovers.index], handovers.parity ^ 1);
            hand_probabilities(shared, handovers.index, tile == piece.first, row, s, scale, rows);
            if (tile + 1 == last) break;
            hand_over(TILE_TOKENS, NOTHING_ENDS);
            finish_tile();
        }
        wgmma_wait<0>();
        hold_registers(half);
        if (last == piece.first) wait_barrier(shared.p_empty[handovers.index], handovers.parity ^ 1);
        end_rows(p, piece, shared.handover[handovers.index], row, rows);
        hand_over(last > piece.first ? piece.valid(last - 1) : 0, piece.whole() ? WHOLE_PIECE_ENDS : PART_ENDS);
    }
    wait_barrier(shared.p_empty[handovers.index], handovers.parity ^ 1);
    hand_over(0, ALL_ENDS);
}

}  // namespace paged_mla_decode
