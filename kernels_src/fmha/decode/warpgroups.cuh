// Consumers of many rows (sm_90a): warpgroups that multiply 64 rows by whole tiles. S = Q K^T with the queries in registers,
// softmax, O += P V with P in registers. Up to 64 rows, the two warpgroups take a piece's tiles in turn and meet at its end;
// with 128 rows, each has half of them.
#pragma once
#include "../../common/wgmma_registers.cuh"
#include "combine.cuh"

namespace paged_decode {

static_assert(CONSUMER_WARPGROUPS == 2 && PARTIES * ROWS == 128, "two warpgroups of 64 rows");
static_assert(!KV_E4M3 && SPAN == 128, "keys and values lie as the products read them");

constexpr int TILE_BLOCKS = TILE_TOKENS / 8;  // of 8 columns in a warpgroup's product

DEVICE int warpgroup() { return threadIdx.x / 128; }

// The first of the thread's two rows (the other is 8 on) among the CTA's.
DEVICE int own_row() { return (PARTIES == 1 ? warpgroup() * 64 : 0) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

struct RowFacts {
    uint32_t mask[2];
    int begin[2];
    DEVICE void load(const Params& p, const Piece& piece) {
        const Request& r = piece.request;
        for (int i = 0; i < 2; ++i) {
            const int row = own_row() + i * 8, token = place_of(p, piece.row_tile * ROWS + row).token;
            // Draft tokens in front of the first key have no keys, not even their own.
            const bool exists = row < piece.rows && token >= r.q_len - r.length;
            mask[i] = exists ? mask_word(p, r, token) : 0;
            begin[i] = exists ? window_begin(p, r, token) : NEVER;
        }
    }
};

using QueryFragments = uint32_t[DEPTH_STEPS][4];

// `flip` is exclusive-ored to pairs of numbers: a negative softmax scale turns the queries' signs.
DEVICE void load_query(const Params& p, const Piece& piece, uint32_t flip, QueryFragments& q) {
    for (int i = 0; i < 2; ++i) {
        const int row = own_row() + i * 8;
        const bool exists = row < piece.rows;
        const RowPlace place = place_of(p, exists ? piece.row_tile * ROWS + row : 0);
        const uint16_t* at = static_cast<const uint16_t*>(p.q) + (piece.request.q_start + place.token) * p.q_token_stride +
                             (piece.head * p.group + place.head) * p.q_head_stride + threadIdx.x % 4 * 2;
        for (int step = 0; step < DEPTH_STEPS; ++step)
            for (int half = 0; half < 2; ++half)
                q[step][half * 2 + i] = exists ? *reinterpret_cast<const uint32_t*>(at + step * 16 + half * 8) ^ flip : 0u;
    }
}

// What a warpgroup knows of its rows: O[4 j + i] is head dim 8 j + 2 (lane % 4) + i % 2 of row own_row() + i / 2 * 8.
struct Accumulator {
    float maximum[2], sum[2];
    float out[HEAD_DIM / 2];
    DEVICE void clear() {
        for (int i = 0; i < 2; ++i) maximum[i] = -INFINITY, sum[i] = 0.f;
        for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.f;
    }
};

// S = Q K^T, under way when this returns.
DEVICE void multiply_keys(uint32_t buffer, const QueryFragments& q, float (&s)[TILE_TOKENS / 2]) {
    for (int i = 0; i < TILE_TOKENS / 2; ++i) s[i] = 0.f;
    hold_registers(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DEPTH_STEPS; ++step)
        wgmma_add<MMA_FP16, false>(s, q[step], depth_major_operand(buffer + step / 4 * SPAN_BYTES + step % 4 * 32));
    wgmma_commit();
}

DEVICE void hide(const Piece& piece, const RowFacts& rows, int tile_token, float (&s)[TILE_TOKENS / 2]) {
    const int prefix = piece.request.length - piece.request.q_len;
#pragma unroll
    for (int j = 0; j < TILE_BLOCKS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = tile_token + j * 8 + threadIdx.x % 4 * 2 + i % 2;
            const bool visible = token < piece.request.length && token >= rows.begin[i / 2] &&
                                 (token < prefix || (rows.mask[i / 2] >> (token - prefix) & 1));
            if (!visible) s[j * 4 + i] = -INFINITY;
        }
}

// Turns S into P; `rescale` brings the accumulator to the new maximum.
DEVICE void softmax(float scale, float (&s)[TILE_TOKENS / 2], Accumulator& acc, float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = -INFINITY;
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) top = fmaxf(top, fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(acc.maximum[i], top * scale);
        const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible so far: weights 0, not NaN
        rescale[i] = exp2_approximate(acc.maximum[i] - anchor);
        acc.maximum[i] = top;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float& cell = s[j * 4 + i * 2 + k];
                cell = exp2_approximate(fmaf(cell, scale, -anchor));
                sum += cell;
            }
        acc.sum[i] = acc.sum[i] * rescale[i] + sum;
    }
}

// P as the first operand of the second product.
DEVICE void pack(const float (&s)[TILE_TOKENS / 2], uint32_t (&probability)[TILE_TOKENS / 16][4]) {
#pragma unroll
    for (int j = 0; j < TILE_BLOCKS; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = s[j * 4 + i * 2], high = s[j * 4 + i * 2 + 1];
            probability[j / 2][j % 2 * 2 + i] = MMA_FP16 ? pack_fp16(low, high) : pack_bf16(low, high);
        }
}

// Tokens outside [low, high) may hold NaN, and 0 x NaN is NaN: their values become zeros before the product reads them.
DEVICE void clear_values(char* buffer, int low, int high) {
    for (int at = threadIdx.x % 128; at < BUFFER_BYTES / 16; at += 128) {
        const int token = at * 16 % SPAN_BYTES / SPAN;
        if (token < low || token >= high) *reinterpret_cast<uint4*>(buffer + at * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    named_barrier_sync<128>(CONSUMER_BARRIER + 1 + warpgroup());
}

// O += P V, under way when this returns.
DEVICE void multiply_values(uint32_t buffer, const uint32_t (&probability)[TILE_TOKENS / 16][4], Accumulator& acc) {
    hold_registers(acc.out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma_add<MMA_FP16, true>(acc.out, probability[step], outer_major_operand(buffer + step * 16 * SPAN, SPAN_BYTES));
    wgmma_commit();
}

// The accumulators become shared.merge (unnormalised O), maximum and sum.
DEVICE void merge_warpgroups(Accumulator& acc, Shared& shared) {
    const int party = PARTIES == 1 ? 0 : warpgroup();
    for (int i = 0; i < 2; ++i) {
        acc.sum[i] += __shfl_xor_sync(~0u, acc.sum[i], 1);
        acc.sum[i] += __shfl_xor_sync(~0u, acc.sum[i], 2);
        if (threadIdx.x % 4 == 0) {
            shared.party_maximum[party][own_row() + i * 8] = acc.maximum[i];
            shared.party_sum[party][own_row() + i * 8] = acc.sum[i];
        }
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    float weight[2];
    for (int i = 0; i < 2; ++i) {
        const int row = own_row() + i * 8;
        float highest = shared.party_maximum[0][row];
        if (PARTIES == 2) highest = fmaxf(highest, shared.party_maximum[PARTIES - 1][row]);
        const float anchor = highest == -INFINITY ? 0.f : highest;  // no visible key: every weight is 0, not NaN
        weight[i] = exp2_approximate(acc.maximum[i] - anchor);
        if (party == 0 && threadIdx.x % 4 == 0) {
            float total = 0.f;
            for (int w = 0; w < PARTIES; ++w)
                total += shared.party_sum[w][row] * exp2_approximate(shared.party_maximum[w][row] - anchor);
            shared.maximum[row] = highest;
            shared.sum[row] = total;
        }
    }
    // Warpgroups take turns, so that the order of the additions is fixed.
    for (int turn = 0; turn < PARTIES; ++turn) {
        if (turn == party)
            for (int j = 0; j < HEAD_DIM / 8; ++j)
                for (int i = 0; i < 2; ++i) {
                    float2& cell = *reinterpret_cast<float2*>(&shared.merge[0][own_row() + i * 8][j * 8 + threadIdx.x % 4 * 2]);
                    const float x = acc.out[j * 4 + i * 2] * weight[i], y = acc.out[j * 4 + i * 2 + 1] * weight[i];
                    cell = turn == 0 ? make_float2(x, y) : make_float2(cell.x + x, cell.y + y);
                }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    }
}

DEVICE void release(Shared& shared, const RingCursor& cursor) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[cursor.index]));
}

DEVICE uint32_t wait_for_buffer(Shared& shared, const RingCursor& cursor) {
    mbarrier_wait(shared_address(&shared.full[cursor.index]), cursor.phase);
    return shared_address(shared.ring[cursor.index]);
}

// A warpgroup's tiles of a piece. The product P V of a tile runs beside the next tile's Q K^T and its softmax.
DEVICE void consume_tiles(const Piece& piece, int window_left, int tiles, float scale, const QueryFragments& q, const RowFacts& rows,
                          RingCursor key, Shared& shared, Accumulator& acc) {
    const Request& r = piece.request;
    // Keys [seen_from, seen_to) are seen by every row.
    const int seen_to = r.length - r.q_len, seen_from = window_left < 0 ? 0 : r.length - 1 - window_left;
    int tile = PARTIES == 1 ? 0 : warpgroup();
    if (tile >= tiles) return;
    key.advance(2 * tile);
    float s[TILE_TOKENS / 2];
    multiply_keys(wait_for_buffer(shared, key), q, s);
    wgmma_wait<0>();
    hold_registers(s);
    release(shared, key);
    RingCursor used;  // values that the product under way reads
    bool pending = false, more;
    do {
        const int tile_token = (r.first_tile + piece.first + tile) * TILE_TOKENS;
        if (tile_token + TILE_TOKENS > seen_to || tile_token < seen_from) hide(piece, rows, tile_token, s);
        float rescale[2];
        softmax(scale, s, acc, rescale);
        wgmma_wait<0>();
        hold_registers(acc.out);
        if (pending) release(shared, used);
        if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f))
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 2; ++j) acc.out[j] *= rescale[j / 2 % 2];
        uint32_t probability[TILE_TOKENS / 16][4];
        pack(s, probability);
        used = key;
        used.advance();
        more = tile + PARTIES < tiles;
        uint32_t keys = shared_address(shared.ring[key.index]);
        if (more) {
            key.advance(2 * PARTIES);
            keys = wait_for_buffer(shared, key);
        }
        multiply_keys(keys, q, s);
        const uint32_t buffer = wait_for_buffer(shared, used);
        const int low = max(piece.begin - tile_token, 0), high = min(r.length - tile_token, TILE_TOKENS);
        if (low > 0 || high < TILE_TOKENS) clear_values(shared.ring[used.index], low, high);
        multiply_values(buffer, probability, acc);
        wgmma_wait<1>();
        hold_registers(s);
        if (more) release(shared, key);
        pending = true;
        tile += PARTIES;
    } while (more);
    wgmma_wait<0>();
    hold_registers(acc.out);
    release(shared, used);
}

DEVICE void consume(const Params& p, const Share& share, Shared& shared) {
    const float softmax_scale = p.softmax_scale_log2 * device_factor(p.softmax_scale_device);
    const float output_scale = p.output_scale * device_factor(p.output_scale_device);
    // The softmax finds maxima before it scales; a scale of 0 must not meet the infinity of a hidden key.
    const float scale = fmaxf(fabsf(softmax_scale), 1e-37f);
    const uint32_t flip = softmax_scale < 0.f ? 0x80008000u : 0u;
    RingCursor cursor;
    for_each_piece(p, share, [&](const Piece& piece) {
        const Request& r = piece.request;
        QueryFragments q;
        load_query(p, piece, flip, q);
        RowFacts rows;
        rows.load(p, piece);
        Accumulator acc;
        acc.clear();
        // Tiles with keys; the one of a request without any is not in the ring.
        const int tiles = min(piece.last, (r.length + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile) - piece.first;
        consume_tiles(piece, p.window_left, tiles, scale, q, rows, cursor, shared, acc);
        cursor.advance_far(2 * max(tiles, 0));
        merge_warpgroups(acc, shared);
        finish_piece(p, share, piece, output_scale, shared);
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // shared.merge and its statistics are free again
    });
}

}  // namespace paged_decode
