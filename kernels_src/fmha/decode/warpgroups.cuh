// Consumers of many rows (sm_90a): warpgroups that multiply 64 rows by whole tiles. S = Q K^T with the queries in registers,
// softmax, O += P V with P in registers. Up to 64 rows, the warpgroups take a piece's tiles in turn and meet at its end; with
// 128 rows, each of two has half of them.
#pragma once
#include "combine.cuh"
#include "queries.cuh"

namespace paged_decode {

static_assert(PARTIES * ROWS == 64 * CONSUMER_WARPGROUPS, "a warpgroup multiplies 64 rows");
static_assert(!KV_E4M3 || PARTIES > 1, "each warpgroup converts the tiles that it takes");
static_assert(KV_E4M3 || SPAN == 128, "keys and values lie as the products read them");

constexpr int PRODUCT_SPAN_BYTES = TILE_TOKENS * 128;  // 64 head dims of a tile, 16 bits each, in a 128-byte swizzle

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
            const int row = own_row() + i * 8, token = place_of(p, piece.rows.first + row).token;
            // Draft tokens in front of the first key have no keys, not even their own.
            const bool exists = row < piece.rows.count && token >= r.q_len - r.length;
            mask[i] = exists ? mask_word(p, r, token) : 0;
            begin[i] = exists ? window_begin(p, r, token) : NEVER;
        }
    }
};

using QueryFragments = uint32_t[DEPTH_STEPS][4];

// `scale` becomes the factor of each row's scores, never below 0: a negative softmax scale turns the queries' signs.
DEVICE void load_query(const Params& p, const Piece& piece, float softmax_scale, QueryFragments& q, float (&scale)[2]) {
    const uint32_t flip = softmax_scale < 0.f ? 0x80008000u : 0u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = own_row() + i * 8;
        const bool exists = row < piece.rows.count;
        const char* at = query_row(p, piece, exists ? row : 0);
        int exponent = 0;
        if constexpr (KV_E4M3) {
            float largest = 0.f;
            if (p.q_type == BF16 && exists)
                for (int j = 0; j < HEAD_DIM / 8; ++j) {
                    const float2 value = query_values(p, at, j * 8 + threadIdx.x % 4 * 2);
                    largest = fmaxf(largest, fmaxf(fabsf(value.x), fabsf(value.y)));
                }
            exponent = common_exponent(largest);
        }
        const float divide = power_of_two(-exponent);
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int element = step * 16 + half * 8 + threadIdx.x % 4 * 2;
                uint32_t word = 0;
                if (exists) {
                    if constexpr (KV_E4M3) {
                        const float2 value = query_values(p, at, element);
                        word = pack_fp16(value.x * divide, value.y * divide) ^ flip;
                    } else {
                        word = *reinterpret_cast<const uint32_t*>(at + element * 2) ^ flip;
                    }
                }
                q[step][half * 2 + i] = word;
            }
        // Maxima are found before they are scaled; a scale of 0 must not meet the infinity of a hidden key.
        scale[i] = fmaxf(fabsf(softmax_scale) * power_of_two(exponent), 1e-37f);
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
        wgmma_add<MMA_FP16, false>(s, q[step], depth_major_operand(buffer + step / 4 * PRODUCT_SPAN_BYTES + step % 4 * 32));
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
DEVICE void softmax(const float (&scale)[2], float (&s)[TILE_TOKENS / 2], Accumulator& acc, float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = -INFINITY;
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) top = fmaxf(top, fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(acc.maximum[i], top * scale[i]);
        const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible so far: weights 0, not NaN
        rescale[i] = exp2_approximate(acc.maximum[i] - anchor);
        acc.maximum[i] = top;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float& cell = s[j * 4 + i * 2 + k];
                cell = exp2_approximate(fmaf(cell, scale[i], -anchor));
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

// What this thread wrote to shared memory is seen by the products of its warpgroup.
DEVICE void publish_to_products() {
    fence_async_proxy();
    named_barrier_sync<128>(CONSUMER_BARRIER + 1 + warpgroup());
}

// Tokens outside [low, high) may hold NaN, and 0 x NaN is NaN: their values become zeros before the product reads them.
DEVICE void clear_values(char* buffer, int low, int high) {
    for (int at = threadIdx.x % 128; at < BUFFER_BYTES / 16; at += 128) {
        const int token = at * 16 % SPAN_BYTES / SPAN;
        if (token < low || token >= high) *reinterpret_cast<uint4*>(buffer + at * 16) = make_uint4(0, 0, 0, 0);
    }
    publish_to_products();
}

// e4m3 of a tile as fp16 where the products read it; tokens outside [low, high) become zeros.
DEVICE void convert(uint32_t from, uint32_t to, int low, int high) {
    constexpr int COLUMNS = HEAD_DIM / 16;
#pragma unroll
    for (int i = 0; i < TILE_TOKENS * COLUMNS / 128; ++i) {
        const int unit = i * 128 + threadIdx.x % 128, token = unit / COLUMNS, column = unit % COLUMNS;
        uint4 raw = load_shared_16_bytes(tile_address(from, token, column));
        if (token < low || token >= high) raw = make_uint4(0, 0, 0, 0);
        const uint4 halves[2] = {
            make_uint4(e4m3_pair_to_fp16(raw.x), e4m3_pair_to_fp16(raw.x >> 16), e4m3_pair_to_fp16(raw.y), e4m3_pair_to_fp16(raw.y >> 16)),
            make_uint4(e4m3_pair_to_fp16(raw.z), e4m3_pair_to_fp16(raw.z >> 16), e4m3_pair_to_fp16(raw.w), e4m3_pair_to_fp16(raw.w >> 16))};
        const uint32_t row = to + column / 4 * PRODUCT_SPAN_BYTES + token * 128;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int half = j ^ (column / 4 % 2);  // lanes of one token in both spans write to different banks
            store_shared_16_bytes(row + ((column % 4 * 2 + half) ^ (token % 8)) * 16, half ? halves[1] : halves[0]);
        }
    }
}

// O += P V, under way when this returns.
DEVICE void multiply_values(uint32_t buffer, const uint32_t (&probability)[TILE_TOKENS / 16][4], Accumulator& acc) {
    hold_registers(acc.out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma_add<MMA_FP16, true>(acc.out, probability[step], outer_major_operand(buffer + step * 16 * 128, PRODUCT_SPAN_BYTES));
    wgmma_commit();
}

// The accumulators become shared.merge (unnormalised O), maximum and sum.
DEVICE void merge_warpgroups(const Piece& piece, Accumulator& acc, Shared& shared) {
    const int party = PARTIES == 1 ? 0 : warpgroup();
    const bool any_rows = own_row() - threadIdx.x % 32 / 4 < piece.rows.count;  // of the warp
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
        for (int w = 1; w < PARTIES; ++w) highest = fmaxf(highest, shared.party_maximum[w][row]);
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
        if (turn == party && any_rows)
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; ++j)
#pragma unroll
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

// Keys or values (kind 0, 1) of the tile at `cursor`, where the products read them. Converted ones give their buffer back.
DEVICE uint32_t arrived(Shared& shared, const RingCursor& cursor, int kind, int low, int high) {
    const uint32_t buffer = wait_for_buffer(shared, cursor);
#if KV_TYPE == 2
    const uint32_t target = shared_address(shared.converted[warpgroup()][kind]);
    convert(buffer, target, low, high);
    release(shared, cursor);
    return target;
#else
    if (kind == 1 && (low > 0 || high < TILE_TOKENS)) clear_values(shared.ring[cursor.index], low, high);
    return buffer;
#endif
}

// A warpgroup's tiles of a piece. The product P V of a tile runs beside the next tile's Q K^T and its softmax.
DEVICE void consume_tiles(const Piece& piece, int window_left, int tiles, const float (&scale)[2], const QueryFragments& q,
                          const RowFacts& rows, RingCursor key, Shared& shared, Accumulator& acc) {
    const Request& r = piece.request;
    // Keys [seen_from, seen_to) are seen by every row.
    const int seen_to = r.length - r.q_len, seen_from = window_left < 0 ? 0 : r.length - 1 - window_left;
    int tile = PARTIES == 1 ? 0 : warpgroup();
    if (tile >= tiles) return;
    key.advance(2 * tile);
    float s[TILE_TOKENS / 2];
    uint32_t keys = arrived(shared, key, 0, 0, TILE_TOKENS);
    if (KV_E4M3) publish_to_products();
    multiply_keys(keys, q, s);
    wgmma_wait<0>();
    hold_registers(s);
    if (!KV_E4M3) release(shared, key);
    RingCursor used;  // values that the product under way reads
    bool pending = false, more;
    do {
        const int tile_token = (r.first_tile + piece.first + tile) * TILE_TOKENS;
        if (tile_token + TILE_TOKENS > seen_to || tile_token < seen_from) hide(piece, rows, tile_token, s);
        float rescale[2];
        softmax(scale, s, acc, rescale);
        wgmma_wait<0>();
        hold_registers(acc.out);
        if (KV_E4M3) named_barrier_sync<128>(CONSUMER_BARRIER + 1 + warpgroup());  // all its warps read what is converted next
        if (!KV_E4M3 && pending) release(shared, used);
        if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f))
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 2; ++j) acc.out[j] *= rescale[j / 2 % 2];
        uint32_t probability[TILE_TOKENS / 16][4];
        pack(s, probability);
        used = key;
        used.advance();
        const int low = max(piece.begin - tile_token, 0), high = min(r.length - tile_token, TILE_TOKENS);
        uint32_t values;
        if (KV_E4M3) values = arrived(shared, used, 1, low, high);
        // After the last tile the product with the keys at hand is made once more and not used: a branch around it would
        // make the compiler wait for each product.
        more = tile + PARTIES < tiles;
        if (more) {
            key.advance(2 * PARTIES);
            keys = arrived(shared, key, 0, 0, TILE_TOKENS);
        }
        if (KV_E4M3) publish_to_products();
        multiply_keys(keys, q, s);
        if (!KV_E4M3) values = arrived(shared, used, 1, low, high);
        multiply_values(values, probability, acc);
        wgmma_wait<1>();
        hold_registers(s);
        if (!KV_E4M3 && more) release(shared, key);
        pending = true;
        tile += PARTIES;
    } while (more);
    wgmma_wait<0>();
    hold_registers(acc.out);
    if (!KV_E4M3) release(shared, used);
}

DEVICE void consume(const Params& p, const Share& share, Shared& shared) {
    const float softmax_scale = p.softmax_scale_log2 * device_factor(p.softmax_scale_device);
    const float output_scale = p.output_scale * device_factor(p.output_scale_device);
    RingCursor cursor;
    // A part's arrival is answered while the next piece is at work: until then its pair is open.
    bool open = false;
    uint32_t arrived = 0;
    const auto close = [&] {
        if (open) merge_if_last(p, shared.open_rows, shared.open_parts, arrived, output_scale, shared);
        open = false;
    };
    for_each_piece(p, share, [&](const Piece& piece) {
        const Request& r = piece.request;
        QueryFragments q;
        float scale[2];
        load_query(p, piece, softmax_scale, q, scale);
        RowFacts rows;
        rows.load(p, piece);
        Accumulator acc;
        acc.clear();
        // Tiles with keys; the one of a request without any is not in the ring.
        const int tiles = min(piece.last, (r.length + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile) - piece.first;
        consume_tiles(piece, p.window_left, tiles, scale, q, rows, cursor, shared, acc);
        cursor.advance_far(2 * max(tiles, 0));
        close();
        merge_warpgroups(piece, acc, shared);
        const Parts parts = parts_of(p, share, piece);
        write_piece(p, piece, parts, output_scale, shared);
        open = parts.count > 1;
        if (!open) return;
        arrived = arrive(p, parts);
        if (threadIdx.x == 0) shared.open_rows = piece.rows, shared.open_parts = parts;
    });
    close();
}

}  // namespace paged_decode
