// Consumers of many rows (sm_90a): warpgroups that multiply 64 rows by whole tiles. S = Q K^T with the queries in registers,
// softmax, O += P V with P in registers. Up to 64 rows, the warpgroups take a piece's tiles in turn and meet at its end; with
// 128 rows, each of two has half of them.
#pragma once
#include "combine.cuh"
#include "converting.cuh"
#include "queries.cuh"

namespace paged_decode {

static_assert(PARTIES * ROWS == 64 * CONSUMER_WARPGROUPS, "a warpgroup multiplies 64 rows");
static_assert(KV_E4M3 || SPAN == 128, "keys and values lie as the products read them");

constexpr int TILE_BLOCKS = TILE_TOKENS / 8;  // of 8 columns in a warpgroup's product

DEVICE int warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }  // the same for a warp, and the compiler knows it

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
            if (p.q_type == TYPE_BF16 && exists)
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

constexpr float LOWEST = -1e30f;  // the maximum of no score

// What a warpgroup knows of its rows: O[4 j + i] is head dim 8 j + 2 (lane % 4) + i % 2 of row own_row(threadIdx.x) + i / 2 * 8;
// sum[2 i] is row i's, of this thread's columns of P or, SUMS_BY_PRODUCT, of all.
struct Accumulator {
    float maximum[2], sum[4];
    float out[HEAD_DIM / 2];
    DEVICE void clear() {
        for (int i = 0; i < 2; ++i) maximum[i] = LOWEST;
        for (int i = 0; i < 4; ++i) sum[i] = 0.f;
        for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.f;
    }
    DEVICE void hold() {
        hold_registers(out);
        if (SUMS_BY_PRODUCT) hold_registers(sum);
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

// The low bits, `count` of them: none for less than one, at most all 32.
DEVICE uint32_t low_bits(int count) { return __funnelshift_lc(~0u, 0, max(count, 0)); }

// Which of the 32 keys from `first` on a row sees, whose window begins at key `begin`: bit k stands for key first + k. Keys
// before `prefix` are no draft's; of those from there on the mask tells.
DEVICE uint32_t visible_keys(int first, int begin, int prefix, uint32_t mask) {
    const int drafts = prefix - first;
    const uint32_t moved = drafts >= 0 ? __funnelshift_lc(0, mask, drafts) : __funnelshift_rc(mask, 0, -drafts);
    return (low_bits(drafts) | moved) & ~low_bits(begin - first);
}

DEVICE void hide(const Piece& piece, const Shared& shared, int tile_token, float (&s)[TILE_TOKENS / 2]) {
    const int row = own_row(threadIdx.x), prefix = piece.request.length - piece.request.q_len;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int begin = shared.row_begin[row + i * 8];
        const uint32_t mask = shared.row_mask[row + i * 8];  // no bits past the last draft token
#pragma unroll
        for (int word = 0; word < TILE_TOKENS / 32; ++word) {
            const uint32_t visible = visible_keys(tile_token + word * 32, begin, prefix, mask) >> threadIdx.x % 4 * 2;
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (!(visible & 1u << (j * 8 + k))) s[(word * 4 + j) * 4 + i * 2 + k] = -INFINITY;
        }
    }
}

using Probabilities = uint32_t[TILE_TOKENS / 16][4];  // P as the first operand of the second product

constexpr int CHAINS = 4;  // of maxima and of sums, which hide the latency of each step

// Raises the maxima of rows that have a score of more than MAXIMUM_SLACK above, and brings what was summed so far to them.
// `top` is the largest score of each of the thread's rows, of its own columns.
DEVICE void raise(float (&top)[2], Accumulator& acc) {
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        for (int step = 1; step < 4; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
        const float before = acc.maximum[i];
        if (top[i] > before + MAXIMUM_SLACK) acc.maximum[i] = top[i];
        rescale[i] = exp2_approximate(before - acc.maximum[i]);
        acc.sum[i * 2] *= rescale[i], acc.sum[i * 2 + 1] *= rescale[i];
    }
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 2; ++j) acc.out[j] *= rescale[j / 2 % 2];
}

// Turns S into P. The maxima follow the scores only where they exceed them by much: in most tiles a warp only finds that none
// of its scores does.
DEVICE void softmax(const float (&scale)[2], float (&s)[TILE_TOKENS / 2], Accumulator& acc, Probabilities& probability) {
    float top[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float tops[CHAINS];
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) {
            const float pair = fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]);
            tops[j % CHAINS] = j < CHAINS ? pair : fmaxf(tops[j % CHAINS], pair);
        }
        top[i] = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])) * scale[i];
    }
    const bool over = top[0] > acc.maximum[0] + MAXIMUM_SLACK || top[1] > acc.maximum[1] + MAXIMUM_SLACK;
    if (__any_sync(~0u, over)) raise(top, acc);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sums[CHAINS];
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) {
            const float low = exp2_approximate(fmaf(s[j * 4 + i * 2], scale[i], -acc.maximum[i]));
            const float high = exp2_approximate(fmaf(s[j * 4 + i * 2 + 1], scale[i], -acc.maximum[i]));
            if (!SUMS_BY_PRODUCT) sums[j % CHAINS] = j < CHAINS ? low + high : sums[j % CHAINS] + (low + high);
            probability[j / 2][j % 2 * 2 + i] = MMA_FP16 ? pack_fp16(low, high) : pack_bf16(low, high);
        }
        if (!SUMS_BY_PRODUCT) acc.sum[i * 2] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

DEVICE int party() { return PARTIES == 1 ? 0 : warpgroup(); }

// This warp has read what the barrier stands for, or is through with what it waits for.
DEVICE void release(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Tokens that are not seen may hold NaN, and 0 x NaN is NaN: their values become zeros before the party's product reads them.
DEVICE void clear_values(uint32_t buffer, const Seen& seen, Shared& shared, uint32_t& phase) {
    constexpr int PARTY_THREADS = CONSUMERS / PARTIES;
    for (int at = threadIdx.x % PARTY_THREADS; at < BUFFER_BYTES / 16; at += PARTY_THREADS)
        if (!seen.has(at * 16 % SPAN_BYTES / SPAN)) store_shared_16_bytes(buffer + at * 16, make_uint4(0, 0, 0, 0));
    fence_async_proxy();
    const uint32_t cleared = shared_address(&shared.cleared[party()]);
    release(cleared);
    mbarrier_wait(cleared, phase);
    phase ^= 1;
}

// O += P V, under way when this returns.
DEVICE void multiply_values(uint32_t buffer, const Probabilities& probability, const Shared& shared, Accumulator& acc) {
    const uint64_t values = outer_major_operand(buffer, PRODUCT_SPAN_BYTES);
    acc.hold();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) {
        wgmma<MMA_FP16, true>(acc.out, probability[step], advance_operand(values, step * 16 * 128));
        if (SUMS_BY_PRODUCT) wgmma_8<MMA_FP16>(acc.sum, probability[step], unordered_operand(shared_address(shared.ones)));
    }
    wgmma_commit();
}

// The accumulators become shared.merge (unnormalised O), maximum and sum.
DEVICE void merge_warpgroups(const Piece& piece, Accumulator& acc, Shared& shared) {
    const uint32_t thread = thread_anew();
    const int first = own_row(thread), own_party = party();
    const bool any_rows = has_rows(piece, thread);
    for (int i = 0; i < 2; ++i) {
        float sum = acc.sum[i * 2];
        for (int step = 1; step < 4 && !SUMS_BY_PRODUCT; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (thread % 4 == 0) {
            shared.party_maximum[own_party][first + i * 8] = acc.maximum[i] == LOWEST ? -INFINITY : acc.maximum[i];
            shared.party_sum[own_party][first + i * 8] = sum;
        }
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    float weight[2];
    for (int i = 0; i < 2; ++i) {
        const int row = first + i * 8;
        float highest = shared.party_maximum[0][row];
        for (int w = 1; w < PARTIES; ++w) highest = fmaxf(highest, shared.party_maximum[w][row]);
        const float anchor = highest == -INFINITY ? 0.f : highest;  // no visible key: every weight is 0, not NaN
        weight[i] = exp2_approximate(acc.maximum[i] - anchor);  // of LOWEST too it is 0
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

// Addresses: where a tile's keys or values lie for the products, what says that they are there, what waits until they are read.
struct Operand {
    uint32_t buffer, full, empty, phase;
    DEVICE void wait() const { mbarrier_wait(full, phase); }
};

// A party's way through its tiles in the ring, and in that of converted ones.
struct Operands {
    RingCursor raw;
    ConvertedCursor converted;
    DEVICE Operands(uint32_t tiles_before) {
        raw.advance_far(2 * tiles_before);
        converted.advance_far(CONVERTED_OF_TILE * tiles_before);
    }
    DEVICE void advance(int tiles) {
        raw.advance(2 * tiles);
        converted.advance(CONVERTED_OF_TILE * tiles);
    }
    template <bool VALUES>
    DEVICE Operand of(Shared& shared) const {
        if constexpr (CONVERTS && (VALUES || KEYS_CONVERTED)) {
            const int index = converted.index + (VALUES ? CONVERTED_OF_TILE - 1 : 0);  // a tile's lie side by side
            return {shared_address(shared.converted[index]), shared_address(&shared.converted_full[index]),
                    shared_address(&shared.converted_empty[index]), converted.phase};
        } else {
            const int index = raw.index + VALUES;
            return {shared_address(shared.ring[index]), shared_address(&shared.full[index]),
                    shared_address(&shared.empty[index]), raw.phase};
        }
    }
};

// A party's tiles of a piece. The product P V of a tile runs beside the next tile's Q K^T.
DEVICE void consume_tiles(const Piece& piece, int window_left, int tiles, const float (&scale)[2], const QueryFragments& q,
                          uint32_t tiles_before, uint32_t& cleared, Shared& shared, Accumulator& acc) {
    const Request& r = piece.request;
    // Keys [seen_from, seen_to) are seen by every row.
    const int seen_to = r.length - r.q_len, seen_from = window_left < 0 ? 0 : r.length - 1 - window_left;
    Operands operands(tiles_before);
    operands.advance(party());
    uint32_t used = 0;  // of the values that the product under way reads
#pragma unroll 1
    for (int tile = party(); tile < tiles; tile += PARTIES) {
        const int tile_token = first_token(piece, tile);
        const Operand keys = operands.of<false>(shared), values = operands.of<true>(shared);
        float s[TILE_TOKENS / 2];
        keys.wait();
        multiply_keys(keys.buffer, q, s);
        wgmma_wait<0>();
        hold_registers(s);
        acc.hold();
        release(keys.empty);
        if (tile >= PARTIES) release(used);
        used = values.empty;
        Probabilities probability;
        if (has_rows(piece, thread_anew())) {
            if (tile_token + TILE_TOKENS > seen_to || tile_token < seen_from) hide(piece, shared, tile_token, s);
            softmax(scale, s, acc, probability);
        }
        values.wait();
        if constexpr (!CONVERTS) {
            const Seen seen(piece, tile_token);
            if (!seen.all()) clear_values(values.buffer, seen, shared, cleared);
        }
        multiply_values(values.buffer, probability, shared, acc);
        operands.advance(PARTIES);
    }
    wgmma_wait<0>();
    acc.hold();
    if (party() < tiles) release(used);
}

DEVICE void consume(const Params& p, const Share& share, Shared& shared) {
    const float softmax_scale = p.softmax_scale_log2 * device_factor(p.softmax_scale_device);
    const float output_scale = p.output_scale * device_factor(p.output_scale_device);
    uint32_t taken = 0;    // tiles so far
    uint32_t cleared = 0;  // phase of the party's barrier
    if (SUMS_BY_PRODUCT && threadIdx.x < 64) {
        shared.ones[threadIdx.x] = 0x3c003c00;  // in fp16
        fence_async_proxy();  // and the barrier of load_row_facts
    }
    // A part's arrival is answered while the next piece is at work: until then its pair is open.
    const auto close = [&] {
        if (shared.open_parts.count > 1)
            merge_if_last(p, shared.open_rows, shared.open_parts, shared.open_arrived, output_scale, shared);
    };
    for_each_piece(p, share, [&](const Piece& piece) {
        QueryFragments q;
        float scale[2];
        load_query(p, piece, softmax_scale, q, scale);
        load_row_facts(p, piece, shared);
        Accumulator acc;
        acc.clear();
        const int tiles = tiles_with_keys(piece);
        consume_tiles(piece, p.window_left, tiles, scale, q, taken, cleared, shared, acc);
        taken += tiles;
        close();
        merge_warpgroups(piece, acc, shared);
#if USE_TMA
        if (p.cluster_size_log2 > 0) {
            if (CONVERTS) named_barrier_arrive<CONSUMERS + CONVERTERS>(MERGED_BARRIER);
            return merge_in_cluster(p, piece.rows, output_scale, shared);
        }
#endif
        const Parts parts = parts_of(p, share, piece);
        write_piece(p, piece, parts, output_scale, shared);
        if (threadIdx.x == 0) {
            shared.open_rows = piece.rows, shared.open_parts = parts;
            if (parts.count > 1) shared.open_arrived = arrive(p, parts);
        }
        if (CONVERTS) named_barrier_arrive<CONSUMERS + CONVERTERS>(MERGED_BARRIER);
    });
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    close();
}

}  // namespace paged_decode
