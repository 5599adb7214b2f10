// The scoring warpgroup of the kernel for e4m3 queries: S = Q K^T, softmax, P and what the others need to know of the rows.
#pragma once
#include "output.cuh"
#include "rings.cuh"
#include "softmax.cuh"

namespace paged_mla_decode {

constexpr int DEPTH_STEP = 32;  // of an e4m3 product
constexpr int DEPTH_STEPS = (LATENT + BOX_COLUMNS) / DEPTH_STEP;

using Queries = uint32_t[DEPTH_STEPS][4];

DEVICE uint32_t load_word(const char* address) { return *reinterpret_cast<const uint32_t*>(address); }

// Row R of a request is head R % heads of its query token R / heads; rows past the last are zero.
DEVICE void load_queries(const Params& p, const Piece& piece, int row, Queries& q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + 8 * half;
        const bool exists = own < piece.rows;
        const char* source = static_cast<const char*>(p.q) + threadIdx.x % 4 * 4;
        source += row_offset(piece, exists ? own : 0, p.heads, p.q_token_stride, p.q_head_stride);
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; ++step) {
            q[step][half] = exists ? load_word(source + step * DEPTH_STEP) : 0;
            q[step][2 + half] = exists ? load_word(source + step * DEPTH_STEP + DEPTH_STEP / 2) : 0;
        }
    }
}

DEVICE void multiply_keys(Shared& shared, const Queries& q, const Ring<BUFFERS>& tiles, Scores& s) {
    wait_barrier(shared.full[tiles.at], tiles.phase);
    const uint64_t keys = depth_major_operand<BOX_COLUMNS>(uniform(shared_address(shared.kv[tiles.at])));
    wgmma_fence();
    wgmma_e4m3<false>(s, q[0], keys);
#pragma unroll
    for (int step = 1; step < DEPTH_STEPS; ++step)
        wgmma_e4m3<true>(s, q[step], advance_operand(keys, step / 2 * RAW_BOX_BYTES + step % 2 * DEPTH_STEP));
    wgmma_commit();
}

// Maxima that scores exceed too far follow them. The other warpgroups rescale what they have by the factors.
DEVICE void raise_maxima(Handover& to, int row, float (&top)[2], Rows& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        for (int step = 1; step < 4; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
        const float maximum = next_maximum(rows.maximum[i], top[i]);
        const float factor = exp2_approximate(rows.maximum[i] - maximum);
        rows.maximum[i] = maximum;
        rows.sum[i] *= factor;
        if (threadIdx.x % 4 == 0) to.factor[row + 8 * i] = factor;
    }
}

// P of a tile. Lanes compare the maxima of their scores only when one of them exceeds its row's too far, which is seldom.
DEVICE void hand_probabilities(Shared& shared, int at, bool first, int row, Scores& s, const float (&scale)[2], Rows& rows) {
    Handover& to = shared.handover[at];
    float top[2];
    thread_maxima(s, scale, top);
    const bool grown = __any_sync(~0u, exceeds(top[0], rows.maximum[0]) || exceeds(top[1], rows.maximum[1]));
    if (grown) raise_maxima(to, row, top, rows);
    if (threadIdx.x % 32 == 0) to.grown[threadIdx.x % WARPGROUP / 32] = grown && !first;
    Probabilities probability;
    exponentiate(s, scale, rows, probability);
    const uint32_t place = fragment_place(shared_address(shared.p[at]), 0);
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) store_matrix_x4(place ^ step * 32, probability[step]);
}

// With the last tile of a piece: what becomes of its rows.
DEVICE void end_rows(const Params& p, const Piece& piece, Handover& to, int row, const Rows& rows) {
    const int slot = slot_of(p, piece, piece.part);
    if (threadIdx.x == CONSUMERS) to.slot = slot, to.rows = piece.rows, to.counter = piece.counter;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int own = row + 8 * i;
        float sum = rows.sum[i];
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 4 > 0) continue;
        if (piece.whole()) {
            const bool exists = own < piece.rows;
            const int head = (piece.row_tile * ROWS + (exists ? own : 0)) % p.heads;
            const RowEnd end = end_row(p, rows.maximum[i], sum, head, output_scale(p));
            if (exists) write_lse(p, piece, own, end.lse);
            to.factor_out[own] = end.factor;
            to.offset_out[own] = exists ? row_offset(piece, own, p.heads, p.out_token_stride, p.out_head_stride) : -1;
        } else if (own / 16 * 16 < piece.rows) {
            static_cast<float2*>(p.partial_statistics)[slot_row(slot, own)] = make_float2(rows.maximum[i], sum);
        }
    }
}

DEVICE void score(const Params& p, const Share& share, Shared& shared) {
    const int row = threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;  // the first of the thread's two
    const float* scale_factor = static_cast<const float*>(p.softmax_scale_device);
    const float given = scale_factor == nullptr ? p.softmax_scale_log2 : p.softmax_scale_log2 * *scale_factor;
    const float magnitude = fmaxf(fabsf(given), 1e-30f);  // 0 x -inf is NaN
    const float scale[2] = {magnitude, magnitude};
    Ring<BUFFERS> tiles;
    Ring<HANDOVERS> handovers;
    const auto hand_over = [&](int valid, End end) {
        Handover& to = shared.handover[handovers.at];
        if (threadIdx.x == CONSUMERS) to.valid = valid, to.end = end;
        fence_async_proxy();
        __syncwarp();
        arrive_for_warp(shared.p_full[handovers.at]);
        handovers.next();
    };
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        Queries q;
        load_queries(p, piece, row, q);
        Rows rows;
        for (int i = 0; i < 2; ++i) {
            rows.visible[i] = visible_drafts(p, piece, row + 8 * i);
            rows.maximum[i] = LOWEST;
            rows.sum[i] = 0.f;
        }
        const int last = piece.first + piece.steps();
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            Scores s;
            multiply_keys(shared, q, tiles, s);
            wgmma_wait<0>();
            hold_registers(s);
            arrive_for_warp(shared.empty[tiles.at]);
            tiles.next();
            mask_scores(piece, tile, rows, given < 0.f, s);
            wait_barrier(shared.p_empty[handovers.at], handovers.phase ^ 1);
            hand_probabilities(shared, handovers.at, tile == piece.first, row, s, scale, rows);
            if (tile + 1 < last) hand_over(TILE_TOKENS, NOTHING_ENDS);
        }
        if (last == piece.first) wait_barrier(shared.p_empty[handovers.at], handovers.phase ^ 1);
        end_rows(p, piece, shared.handover[handovers.at], row, rows);
        hand_over(last > piece.first ? piece.valid(last - 1) : 0, piece.whole() ? WHOLE_PIECE_ENDS : PART_ENDS);
    }
    wait_barrier(shared.p_empty[handovers.at], handovers.phase ^ 1);
    hand_over(0, ALL_ENDS);
}

}  // namespace paged_mla_decode
