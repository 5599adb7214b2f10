// Consumers of many rows (sm_90a): warpgroups that multiply 64 rows by whole tiles. S = Q K^T with the queries in registers,
// softmax, O += P V with P in registers. Up to 64 rows, the warpgroups take a piece's tiles in turn and meet at its end; with
// 128 rows, each of two has half of them.
#pragma once
#include "combine.cuh"
#include "queries.cuh"

namespace paged_decode {

static_assert(PARTIES * ROWS == 64 * CONSUMER_WARPGROUPS, "a warpgroup multiplies 64 rows");
static_assert(KV_E4M3 || SPAN == 128, "keys and values lie as the products read them");

constexpr int PRODUCT_SPAN_BYTES = TILE_TOKENS * 128;  // 64 head dims of a tile, 16 bits each, in a 128-byte swizzle

constexpr int TILE_BLOCKS = TILE_TOKENS / 8;  // of 8 columns in a warpgroup's product

DEVICE int warpgroup() { return threadIdx.x / 128; }

// The first of the warp's 16 rows among the CTA's. The second warpgroup begins with its third warp: where few rows exist, the
// warps that have them are on different schedulers.
DEVICE int first_row(uint32_t thread) { return (PARTIES == 1 ? thread / 128 * 64 : 0) + (thread / 32 + thread / 128 * 2) % 4 * 16; }

// The first of the thread's two rows; the other is 8 on.
DEVICE int own_row(uint32_t thread) { return first_row(thread) + thread % 32 / 4; }

// Whether any of the warp's rows exists; where none does, the warp only takes part in what warpgroups do together.
DEVICE bool has_rows(const Piece& piece, uint32_t thread) { return first_row(thread) < piece.rows.count; }

// What each row sees, for `hide`: in shared memory, since registers are short. Ends with a barrier of the consumers.
DEVICE void load_row_facts(const Params& p, const Piece& piece, Shared& shared) {
    const Request& r = piece.request;
    if (threadIdx.x < ROWS) {
        const int token = place_of(p, piece.rows.first + threadIdx.x).token;
        // Draft tokens in front of the first key have no keys, not even their own.
        const bool exists = threadIdx.x < piece.rows.count && token >= r.q_len - r.length;
        shared.row_mask[threadIdx.x] = exists ? mask_word(p, r, token) : 0;
        shared.row_begin[threadIdx.x] = exists ? window_begin(p, r, token) : NEVER;
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
}

constexpr int STEP_BYTES = 32;  // of a row's depth that one product step takes
constexpr int PRODUCT_STEPS = HEAD_DIM * (Q_E4M3 ? 1 : 2) / STEP_BYTES;

// A row's depths in each step: 4 bytes at 4 (lane % 4), and those 16 bytes on.
using QueryFragments = uint32_t[PRODUCT_STEPS][4];

// `scale` becomes the factor of each row's scores, never below 0: a negative softmax scale turns the queries' signs.
DEVICE void load_query(const Params& p, const Piece& piece, float softmax_scale, QueryFragments& q, float (&scale)[2]) {
    const uint32_t flip = softmax_scale < 0.f ? (Q_E4M3 ? 0x80808080u : 0x80008000u) : 0u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = own_row(threadIdx.x) + i * 8;
        const bool exists = row < piece.rows.count;
        const char* at = query_row(p, piece, exists ? row : 0);
        int exponent = 0;
        if constexpr (KEYS_CONVERTED) {
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
        for (int step = 0; step < PRODUCT_STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int byte = step * STEP_BYTES + half * 16 + threadIdx.x % 4 * 4;
                uint32_t word = 0;
                if (exists) {
                    if constexpr (KEYS_CONVERTED) {
                        const float2 value = query_values(p, at, byte / 2);
                        word = pack_fp16(value.x * divide, value.y * divide) ^ flip;
                    } else {
                        word = *reinterpret_cast<const uint32_t*>(at + byte) ^ flip;
                    }
                }
                q[step][half * 2 + i] = word;
            }
        // Maxima are found before they are scaled; a scale of 0 must not meet the infinity of a hidden key.
        scale[i] = fmaxf(fabsf(softmax_scale) * power_of_two(exponent), 1e-37f);
    }
}

// What a warpgroup knows of its rows: O[4 j + i] is head dim 8 j + 2 (lane % 4) + i % 2 of row own_row(threadIdx.x) + i / 2 * 8.
struct Accumulator {
    float maximum[2], sum[2];
    float out[HEAD_DIM / 2];
    DEVICE void clear() {
        for (int i = 0; i < 2; ++i) maximum[i] = -INFINITY, sum[i] = 0.f;
        for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.f;
    }
};

// A step of S = Q K^T; the first one needs no zeros to add to.
template <bool ADD>
DEVICE void product_step(uint64_t keys, const QueryFragments& q, float (&s)[TILE_TOKENS / 2], int step) {
    if constexpr (Q_E4M3)
        wgmma_e4m3<ADD>(s, q[step], advance_operand(keys, step * STEP_BYTES));
    else
        wgmma<MMA_FP16, false, ADD>(s, q[step], advance_operand(keys, step / 4 * PRODUCT_SPAN_BYTES + step % 4 * STEP_BYTES));
}

// S = Q K^T, under way when this returns.
DEVICE void multiply_keys(uint32_t buffer, const QueryFragments& q, float (&s)[TILE_TOKENS / 2]) {
    const uint64_t keys = depth_major_operand<Q_E4M3 ? SPAN : 128>(buffer);
    hold_registers(s);
    wgmma_fence();
    product_step<false>(keys, q, s, 0);
#pragma unroll
    for (int step = 1; step < PRODUCT_STEPS; ++step) product_step<true>(keys, q, s, step);
    wgmma_commit();
}

DEVICE void hide(const Piece& piece, const Shared& shared, int tile_token, float (&s)[TILE_TOKENS / 2]) {
    const int first = tile_token + threadIdx.x % 4 * 2, row = own_row(threadIdx.x);
    const int prefix = piece.request.length - piece.request.q_len;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int begin = shared.row_begin[row + i * 8];
        const uint32_t mask = shared.row_mask[row + i * 8];  // no bits past the last draft token
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int token = first + j * 8 + k, draft = token - prefix;
                const bool visible = token >= begin && (draft < 0 || (__funnelshift_rc(mask, 0, draft) & 1));
                if (!visible) s[j * 4 + i * 2 + k] = -INFINITY;
            }
    }
}

// Turns S into P; `rescale` brings the accumulator to the new maximum, which follows the scores only where they exceed it by
// much: the accumulator is seldom rescaled then.
DEVICE void softmax(const float (&scale)[2], float (&s)[TILE_TOKENS / 2], Accumulator& acc, float (&rescale)[2]) {
    constexpr int CHAINS = 4;  // of maxima and of sums, which hide the latency of each step
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float tops[CHAINS], sums[CHAINS];
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) {
            const float pair = fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]);
            tops[j % CHAINS] = j < CHAINS ? pair : fmaxf(tops[j % CHAINS], pair);
        }
        float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top *= scale[i];
        top = top > acc.maximum[i] + MAXIMUM_SLACK ? top : acc.maximum[i];
        const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible so far: weights 0, not NaN
        rescale[i] = exp2_approximate(acc.maximum[i] - anchor);
        acc.maximum[i] = top;
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float& cell = s[j * 4 + i * 2 + k];
                cell = exp2_approximate(fmaf(cell, scale[i], -anchor));
            }
            const float pair = s[j * 4 + i * 2] + s[j * 4 + i * 2 + 1];
            sums[j % CHAINS] = j < CHAINS ? pair : sums[j % CHAINS] + pair;
        }
        acc.sum[i] = acc.sum[i] * rescale[i] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
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

constexpr int PARTY_THREADS = CONSUMERS / PARTIES;  // that take a tile together

DEVICE int party() { return PARTIES == 1 ? 0 : warpgroup(); }

DEVICE void meet_party() {
    // Each in its own instruction: barriers named by a register are more than the tools can follow.
    if (party() == 0)
        named_barrier_sync<PARTY_THREADS>(CONSUMER_BARRIER + 1);
    else
        named_barrier_sync<PARTY_THREADS>(CONSUMER_BARRIER + 2);
}

// What this thread wrote to shared memory is seen by the products of its party.
DEVICE void publish_to_products() {
    fence_async_proxy();
    meet_party();
}

// Tokens of a tile that any row may see; the others may hold anything.
struct Seen {
    int low, high;
};

// Tokens that are not seen may hold NaN, and 0 x NaN is NaN: their values become zeros before the product reads them.
DEVICE void clear_values(char* buffer, Seen seen) {
    for (int at = threadIdx.x % PARTY_THREADS; at < BUFFER_BYTES / 16; at += PARTY_THREADS) {
        const int token = at * 16 % SPAN_BYTES / SPAN;
        if (token < seen.low || token >= seen.high) *reinterpret_cast<uint4*>(buffer + at * 16) = make_uint4(0, 0, 0, 0);
    }
    publish_to_products();
}

// A thread's units of 16 e4m3 in a tile. Eight neighbouring lanes take four columns of two tokens whose low bits and bits 2
// differ, so that neither what they read nor what they write meets in a bank.
struct Conversion {
    uint32_t from, to;  // of the first unit; its second half lies 16 bytes on or back
    static constexpr int COLUMN_SETS = HEAD_DIM / 64;  // of four units, which are 64 head dims
    static constexpr int ROUND_TOKENS = PARTY_THREADS / 4;
    static constexpr int ROUNDS = TILE_TOKENS / ROUND_TOKENS * COLUMN_SETS;
    DEVICE Conversion() {
        const int lane = threadIdx.x % 32, column = lane % 4;
        const int token = threadIdx.x % PARTY_THREADS / 32 * 8 + (lane / 8 ^ lane / 4 % 2 * 5);
        from = tile_address(0, token, column);
        to = token * 128 + (column * 2 ^ token % 8) * 16;
    }
    DEVICE static int set_of(int round) { return round % COLUMN_SETS; }
    DEVICE static int tokens_of(int round) { return round / COLUMN_SETS * ROUND_TOKENS; }
    // Units of the second set lie 64 bytes on in a row of 128, which the swizzle turns into an exclusive or.
    DEVICE uint32_t from_of(int round) const { return (from ^ set_of(round) * 64) + tokens_of(round) * SPAN; }
    DEVICE uint32_t to_of(int round) const { return to + set_of(round) * PRODUCT_SPAN_BYTES + tokens_of(round) * 128; }
};

// e4m3 of a tile as fp16 where the products read it.
DEVICE void convert(const Conversion& c, uint32_t from, uint32_t to) {
    constexpr int AHEAD = 4;  // loads in flight
#pragma unroll
    for (int base = 0; base < Conversion::ROUNDS; base += AHEAD) {
        uint4 raw[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD && base + i < Conversion::ROUNDS; ++i)
            raw[i] = load_shared_16_bytes(from + c.from_of(base + i));
#pragma unroll
        for (int i = 0; i < AHEAD && base + i < Conversion::ROUNDS; ++i) {
            const uint32_t target = to + c.to_of(base + i);
            store_shared_16_bytes(target,
                                  make_uint4(e4m3_pair_to_fp16(raw[i].x), e4m3_pair_to_fp16(raw[i].x >> 16),
                                             e4m3_pair_to_fp16(raw[i].y), e4m3_pair_to_fp16(raw[i].y >> 16)));
            store_shared_16_bytes(target ^ 16,
                                  make_uint4(e4m3_pair_to_fp16(raw[i].z), e4m3_pair_to_fp16(raw[i].z >> 16),
                                             e4m3_pair_to_fp16(raw[i].w), e4m3_pair_to_fp16(raw[i].w >> 16)));
        }
    }
}

// O += P V, under way when this returns.
DEVICE void multiply_values(uint32_t buffer, const uint32_t (&probability)[TILE_TOKENS / 16][4], Accumulator& acc) {
    const uint64_t values = outer_major_operand(buffer, PRODUCT_SPAN_BYTES);
    hold_registers(acc.out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma<MMA_FP16, true>(acc.out, probability[step], advance_operand(values, step * 16 * 128));
    wgmma_commit();
}

// The accumulators become shared.merge (unnormalised O), maximum and sum.
DEVICE void merge_warpgroups(const Piece& piece, Accumulator& acc, Shared& shared) {
    const uint32_t thread = thread_anew();
    const int first = own_row(thread), own_party = party();
    const bool any_rows = has_rows(piece, thread);
    for (int i = 0; i < 2; ++i) {
        acc.sum[i] += __shfl_xor_sync(~0u, acc.sum[i], 1);
        acc.sum[i] += __shfl_xor_sync(~0u, acc.sum[i], 2);
        if (thread % 4 == 0) {
            shared.party_maximum[own_party][first + i * 8] = acc.maximum[i];
            shared.party_sum[own_party][first + i * 8] = acc.sum[i];
        }
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    float weight[2];
    for (int i = 0; i < 2; ++i) {
        const int row = first + i * 8;
        float highest = shared.party_maximum[0][row];
        for (int w = 1; w < PARTIES; ++w) highest = fmaxf(highest, shared.party_maximum[w][row]);
        const float anchor = highest == -INFINITY ? 0.f : highest;  // no visible key: every weight is 0, not NaN
        weight[i] = exp2_approximate(acc.maximum[i] - anchor);
        if (own_party == 0 && thread % 4 == 0) {
            float total = 0.f;
            for (int w = 0; w < PARTIES; ++w)
                total += shared.party_sum[w][row] * exp2_approximate(shared.party_maximum[w][row] - anchor);
            shared.maximum[row] = highest;
            shared.sum[row] = total;
        }
    }
    // Warpgroups take turns, so that the order of the additions is fixed.
    for (int turn = 0; turn < PARTIES; ++turn) {
        if (turn == own_party && any_rows)
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float2& cell = *reinterpret_cast<float2*>(&shared.merge[0][first + i * 8][j * 8 + thread % 4 * 2]);
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

// Keys of the tile at `cursor`, where the products read them. Converted ones give their buffer back.
DEVICE uint32_t arrived_keys(Shared& shared, const RingCursor& cursor, const Conversion& conversion) {
    const uint32_t buffer = wait_for_buffer(shared, cursor);
#if KV_TYPE == 2 && !Q_E4M3
    const uint32_t target = shared_address(shared.converted[party()][0]);
    convert(conversion, buffer, target);
    release(shared, cursor);
    publish_to_products();
    return target;
#else
    return buffer;
#endif
}

DEVICE uint32_t arrived_values(Shared& shared, const RingCursor& cursor, Seen seen) {
    const uint32_t buffer = wait_for_buffer(shared, cursor);
    if (seen.low > 0 || seen.high < TILE_TOKENS) clear_values(shared.ring[cursor.index], seen);
    return buffer;
}

#if KV_TYPE == 2
// Values of the tile at `cursor`, where the products read them: in the party's place of this turn.
DEVICE uint32_t convert_values(Shared& shared, const RingCursor& cursor, const Conversion& conversion, int turn, Seen seen) {
    const uint32_t target = shared_address(shared.converted[party()][KEYS_CONVERTED + turn]);
    convert(conversion, arrived_values(shared, cursor, seen), target);
    release(shared, cursor);
    return target;
}
#endif

// A party's tiles of a piece. The product P V of a tile runs beside the next tile's Q K^T and conversions.
DEVICE void consume_tiles(const Piece& piece, int window_left, int tiles, const float (&scale)[2], const QueryFragments& q,
                          RingCursor key, Shared& shared, Accumulator& acc) {
    const Request& r = piece.request;
    // Keys [seen_from, seen_to) are seen by every row.
    const int seen_to = r.length - r.q_len, seen_from = window_left < 0 ? 0 : r.length - 1 - window_left;
    const Conversion conversion;
    key.advance(2 * party());
    RingCursor used = key;  // values that the product under way reads
#pragma unroll 1
    for (int tile = party(); tile < tiles; tile += PARTIES) {
        const int tile_token = (r.first_tile + piece.first + tile) * TILE_TOKENS;
        const Seen seen = {max(piece.begin - tile_token, 0), min(r.length - tile_token, TILE_TOKENS)};
        const RingCursor value = {key.index + 1, key.phase};  // keys and values lie in pairs
        float s[TILE_TOKENS / 2];
        multiply_keys(arrived_keys(shared, key, conversion), q, s);
#if KV_TYPE == 2
        const uint32_t values = convert_values(shared, value, conversion, tile / PARTIES % 2, seen);
#endif
        wgmma_wait<0>();
        hold_registers(s);
        hold_registers(acc.out);
        if (!KEYS_CONVERTED) release(shared, key);
        if (!KV_E4M3 && tile >= PARTIES) release(shared, used);
        uint32_t probability[TILE_TOKENS / 16][4];
        if (has_rows(piece, thread_anew())) {
            if (tile_token + TILE_TOKENS > seen_to || tile_token < seen_from) hide(piece, shared, tile_token, s);
            float rescale[2];
            softmax(scale, s, acc, rescale);
            if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f))
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 2; ++j) acc.out[j] *= rescale[j / 2 % 2];
            pack(s, probability);
        }
#if KV_TYPE == 2
        publish_to_products();  // and every warp is through with the values of the tile before
#else
        const uint32_t values = arrived_values(shared, value, seen);
        used = value;
#endif
        multiply_values(values, probability, acc);
        key.advance(2 * PARTIES);
    }
    wgmma_wait<0>();
    hold_registers(acc.out);
    if (!KV_E4M3 && party() < tiles) release(shared, used);
}

DEVICE void consume(const Params& p, const Share& share, Shared& shared) {
    const float softmax_scale = p.softmax_scale_log2 * device_factor(p.softmax_scale_device);
    const float output_scale = p.output_scale * device_factor(p.output_scale_device);
    uint32_t buffers = 0;  // of the ring, taken so far
    // A part's arrival is answered while the next piece is at work: until then its pair is open.
    const auto close = [&] {
        if (shared.open_parts.count > 1)
            merge_if_last(p, shared.open_rows, shared.open_parts, shared.open_arrived, output_scale, shared);
    };
    for_each_piece(p, share, [&](const Piece& piece) {
        const Request& r = piece.request;
        QueryFragments q;
        float scale[2];
        load_query(p, piece, softmax_scale, q, scale);
        load_row_facts(p, piece, shared);
        Accumulator acc;
        acc.clear();
        // Tiles with keys; the one of a request without any is not in the ring.
        const int tiles = min(piece.last, (r.length + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile) - piece.first;
        RingCursor cursor;
        cursor.advance_far(buffers);
        consume_tiles(piece, p.window_left, tiles, scale, q, cursor, shared, acc);
        buffers += 2 * max(tiles, 0);
        close();
        merge_warpgroups(piece, acc, shared);
        const Parts parts = parts_of(p, share, piece);
        write_piece(p, piece, parts, output_scale, shared);
        if (threadIdx.x == 0) {
            shared.open_rows = piece.rows, shared.open_parts = parts;
            if (parts.count > 1) shared.open_arrived = arrive(p, parts);
        }
    });
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    close();
}

}  // namespace paged_decode
