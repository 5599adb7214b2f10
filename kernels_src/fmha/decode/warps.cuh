// Consumers of few rows: warps that each take a quarter of a tile's tokens, in blocks of 16. Queries as MMA fragments,
// S^T = K Q^T, softmax, O^T += V^T P^T, and the meeting of the warps.
#pragma once
#include "combine.cuh"
#include "queries.cuh"

namespace paged_decode {

// A tile is cut into blocks of 64 tokens, of which each warp takes 16.
constexpr int BLOCK_TOKENS = 16 * PARTIES;
constexpr int BLOCKS = TILE_TOKENS / BLOCK_TOKENS;
static_assert(BLOCKS * BLOCK_TOKENS == TILE_TOKENS, "a tile is whole blocks");
// Chains of accumulation that hide the latency of the first product; the order of the additions does not depend on ROWS.
constexpr int CHAINS = 2;

// What one warp knows of one pair: for each of the thread's two rows of a row tile, what is subtracted from base-2
// exponents (a maximum so far), the score above which a new one is needed (-inf: nothing is visible so far), the sum of
// this thread's tokens, and O^T (rows 2 (lane % 4) + {0, 1}; head dims: see dim_of).
struct Accumulator {
    float anchor[ROW_TILES][2];
    float limit[ROW_TILES][2];
    float sum[ROW_TILES][2];
    float out[ROW_TILES][DEPTH_STEPS][4];
    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) anchor[n][i] = sum[n][i] = 0.f, limit[n][i] = -INFINITY;
#pragma unroll
            for (int d = 0; d < DEPTH_STEPS; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][d][i] = 0.f;
        }
    }
};

// The head dim of accumulator element i of a 16-dim step. e4m3 values come two dims to a 16-bit matrix element, so that a
// fragment's upper rows are the even dims and its lower rows the odd ones.
DEVICE int dim_of(int step, int i) {
    const int lane = threadIdx.x % 32;
    return step * 16 + (KV_E4M3 ? lane / 4 * 2 + i / 2 : lane / 4 + i / 2 * 8);
}

// The first row of a warp's row tile n among the CTA's.
DEVICE int first_row(int n) { return (threadIdx.x / (32 * PARTIES) * ROW_TILES + n) * 8; }

// One 16-dim step of a row tile's queries as the B operand: the depths 2 (lane % 4) + {0, 1} and those 8 on.
using QueryFragment = uint2;

// The fragments of eight rows from `row_base` on (of the piece's), through store(step, fragment); `flip` turns their signs.
// Returns the factor that undoes what was done to this lane's row, row_base + lane / 4, to bring it into fp16.
template <class Store>
DEVICE float load_query(const Params& p, const Piece& piece, int row_base, uint32_t flip, Store store) {
    const int lane = threadIdx.x % 32;
    const int row = row_base + lane / 4;
    const bool exists = row < piece.rows.count;
    const char* at = query_row(p, piece, exists ? row : 0);
    if constexpr (!KV_E4M3) {
        at += lane % 4 * 4;
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; ++step)
            store(step, exists ? make_uint2(*reinterpret_cast<const uint32_t*>(at + step * 32) ^ flip,
                                            *reinterpret_cast<const uint32_t*>(at + step * 32 + 16) ^ flip)
                               : make_uint2(0, 0));
        return 1.f;
    } else {
        // Depths follow the key fragments of multiply_keys: four dims of a lane in a row. All loads are under way together.
        constexpr int BATCH = DEPTH_STEPS < 16 ? DEPTH_STEPS : 16;
        const int item = p.q_type == TYPE_E4M3 ? 1 : 2;
        at += lane % 4 * 4 * item;
        int exponent = 0;
        const auto load = [&](int step) {
            const char* four = at + step * 16 * item;
            uint2 raw = make_uint2(0, 0);
            if (exists) {
                raw.x = *reinterpret_cast<const uint32_t*>(four);
                if (item == 2) raw.y = *reinterpret_cast<const uint32_t*>(four + 4);
            }
            return raw;
        };
        const auto largest_of = [](uint32_t pair) {
            const float2 value = unpack_bf16(pair);
            return fmaxf(fabsf(value.x), fabsf(value.y));
        };
        if (DEPTH_STEPS > BATCH && p.q_type == TYPE_BF16) {
            float largest = 0.f;
#pragma unroll 4
            for (int step = 0; step < DEPTH_STEPS; ++step) {
                const uint2 raw = load(step);
                largest = fmaxf(largest, fmaxf(largest_of(raw.x), largest_of(raw.y)));
            }
            exponent = common_exponent(largest);
        }
#pragma unroll
        for (int first = 0; first < DEPTH_STEPS; first += BATCH) {
            uint2 raw[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) raw[i] = load(first + i);
            if (p.q_type == TYPE_BF16) {
                if (DEPTH_STEPS <= BATCH) {
                    float largest = 0.f;
#pragma unroll
                    for (int i = 0; i < BATCH; ++i) largest = fmaxf(largest, fmaxf(largest_of(raw[i].x), largest_of(raw[i].y)));
                    exponent = common_exponent(largest);
                }
                const float scale = power_of_two(-exponent);
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const float2 low = unpack_bf16(raw[i].x), high = unpack_bf16(raw[i].y);
                    raw[i] = make_uint2(pack_fp16(low.x * scale, low.y * scale), pack_fp16(high.x * scale, high.y * scale));
                }
            } else if (p.q_type == TYPE_E4M3) {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const uint32_t four = raw[i].x;
                    raw[i] = make_uint2(e4m3_pair_to_fp16(four), e4m3_pair_to_fp16(four >> 16));
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) store(first + i, make_uint2(raw[i].x ^ flip, raw[i].y ^ flip));
        }
        return power_of_two(exponent);
    }
}

// Queries of a piece where the consumers need them, and what each row sees. Ends with a barrier of the consumers.
struct Queries {
    QueryFragment own[QUERY_IN_SHARED ? 1 : ROW_TILES][QUERY_IN_SHARED ? 1 : DEPTH_STEPS];
    // Factors of the scores of the thread's rows, above 0: a negative softmax scale turns the queries' signs, and one of 0
    // must not meet the infinity of a hidden key.
    float scale[KV_E4M3 ? ROW_TILES : 1][KV_E4M3 ? 2 : 1];

    DEVICE float scale_of(int n, int i) const { return scale[KV_E4M3 ? n : 0][KV_E4M3 ? i : 0]; }

    DEVICE void load(const Params& p, const Piece& piece, float softmax_scale, Shared& shared) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (threadIdx.x < ROWS) {
            const int token = place_of(p, piece.rows.first + threadIdx.x).token;
            const Request& r = piece.request;
            // Draft tokens in front of the first key have no keys, not even their own.
            const bool exists = threadIdx.x < piece.rows.count && token >= r.q_len - r.length;
            shared.row_mask[threadIdx.x] = exists ? mask_word(p, r, token) : 0;
            shared.row_begin[threadIdx.x] = exists ? window_begin(p, r, token) : NEVER;
        }
        const uint32_t flip = softmax_scale < 0.f ? 0x80008000u : 0u;
        const float magnitude = fabsf(softmax_scale);
        if constexpr (QUERY_IN_SHARED) {
            for (int n = warp; n < ROWS / 8; n += CONSUMER_WARPS) {
                const float undo =
                    load_query(p, piece, n * 8, flip, [&](int step, QueryFragment f) { shared.query[n][step][lane] = f; });
                if (KV_E4M3 && lane % 4 == 0) shared.row_undo[n * 8 + lane / 4] = undo;
            }
        } else {
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) {
                const float undo = load_query(p, piece, n * 8, flip, [&](int step, QueryFragment f) { own[n][step] = f; });
                if constexpr (KV_E4M3)
                    for (int i = 0; i < 2; ++i)
                        scale[n][i] = fmaxf(magnitude * __shfl_sync(~0u, undo, (lane % 4 * 2 + i) * 4), 1e-37f);
            }
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        if constexpr (!KV_E4M3) {
            scale[0][0] = fmaxf(magnitude, 1e-37f);
        } else if constexpr (QUERY_IN_SHARED) {
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
                for (int i = 0; i < 2; ++i)
                    scale[n][i] = fmaxf(magnitude * shared.row_undo[first_row(n) + lane % 4 * 2 + i], 1e-37f);
        }
    }

    DEVICE QueryFragment get(const Shared& shared, int n, int step) const {
        if constexpr (QUERY_IN_SHARED)
            return shared.query[first_row(n) / 8][step][threadIdx.x % 32];
        else
            return own[n][step];
    }
};

DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (MMA_FP16)
        mma_fp16_16x8x16(d, a, b0, b1);
    else
        mma_bf16_16x8x16(d, a, b0, b1);
}

DEVICE int warp_first_token() { return threadIdx.x / 32 % PARTIES * 16; }

// Where a lane's 16 bytes of keys and of values begin in a buffer: of the warp's first block, of the first 32 bytes.
struct LaneOffsets {
    uint32_t keys, values;
    DEVICE LaneOffsets() {
        const int lane = threadIdx.x % 32;
        keys = tile_address(0, warp_first_token() + lane % 16, lane / 16);
        values = tile_address(0, warp_first_token() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
};

// The 32 bytes number `step` of a token, from the address of the first; of another block it is BLOCK_TOKENS on.
DEVICE uint32_t step_address(uint32_t first, int step, int block) {
    return (first ^ (step * 32 % SPAN)) + step * 32 / SPAN * SPAN_BYTES + block * BLOCK_TOKENS * SPAN;
}

// S^T of the warp's blocks, not yet scaled.
DEVICE void multiply_keys(uint32_t keys, const Queries& queries, const Shared& shared, float (&s)[BLOCKS][ROW_TILES][4]) {
    float chain[CHAINS][BLOCKS][ROW_TILES][4];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c)
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) chain[c][b][n][i] = 0.f;
    constexpr int STEPS = TOKEN_BYTES / 32;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        QueryFragment q[KV_E4M3 ? 2 : 1][ROW_TILES];
#pragma unroll
        for (int half = 0; half < (KV_E4M3 ? 2 : 1); ++half)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) q[half][n] = queries.get(shared, n, KV_E4M3 ? step * 2 + half : step);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            uint32_t raw[4];  // tokens 0-7 and 8-15 of 16 bytes, then of the next 16
            load_matrix_x4(raw, step_address(keys, step, b));
            if constexpr (KV_E4M3) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t k[4];
                    e4m3_to_fp16(raw[half * 2], k[0], k[2]);
                    e4m3_to_fp16(raw[half * 2 + 1], k[1], k[3]);
#pragma unroll
                    for (int n = 0; n < ROW_TILES; ++n) multiply(chain[half % CHAINS][b][n], k, q[half][n].x, q[half][n].y);
                }
            } else {
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) multiply(chain[step % CHAINS][b][n], raw, q[0][n].x, q[0][n].y);
            }
        }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[b][n][i] = chain[0][b][n][i] + chain[1][b][n][i];
}

// Hides what rows must not see, in a tile that begins at key `tile_token`.
DEVICE void hide(const Piece& piece, int tile_token, const Shared& shared, float (&s)[BLOCKS][ROW_TILES][4]) {
    const int lane = threadIdx.x % 32;
    const int prefix = piece.request.length - piece.request.q_len;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row(n) + lane % 4 * 2 + i;
            const int begin = shared.row_begin[row];
            const uint32_t mask = shared.row_mask[row];
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int token = tile_token + b * BLOCK_TOKENS + warp_first_token() + lane / 4 + half * 8;
                    const bool visible = token < piece.request.length && token >= begin &&
                                         (token < prefix || (mask >> (token - prefix) & 1));
                    if (!visible) s[b][n][half * 2 + i] = -INFINITY;
                }
        }
}

// Brings the accumulator to new maxima, for the rows that need one. `top` is the largest score of each of the thread's rows.
DEVICE void raise(const Queries& queries, float (&top)[ROW_TILES][2], Accumulator& acc) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
        float rescale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int step = 4; step < 32; step *= 2) top[n][i] = fmaxf(top[n][i], __shfl_xor_sync(~0u, top[n][i], step));
            const float limit = acc.limit[n][i], before = acc.anchor[n][i];
            if (top[n][i] > limit) {
                acc.anchor[n][i] = top[n][i] * queries.scale_of(n, i);
                acc.limit[n][i] = fmaxf((acc.anchor[n][i] + MAXIMUM_SLACK) / queries.scale_of(n, i), -3e38f);
            }
            rescale[i] = limit == -INFINITY ? 0.f : exp2_approximate(before - acc.anchor[n][i]);
            acc.sum[n][i] *= rescale[i];
        }
#pragma unroll
        for (int d = 0; d < DEPTH_STEPS; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc.out[n][d][i] *= rescale[i % 2];
    }
}

// Turns S^T into P^T as the B operand of the second product. Scores are within MAXIMUM_SLACK of a maximum that is kept until
// one is above that, so that most tiles need no maximum over the lanes; each row's maxima depend on its own scores alone.
DEVICE void softmax(const Queries& queries, float (&s)[BLOCKS][ROW_TILES][4], Accumulator& acc,
                    uint32_t (&probability)[BLOCKS][ROW_TILES][2]) {
    float top[ROW_TILES][2];
    bool over = false;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[n][i] = fmaxf(s[0][n][i], s[0][n][i + 2]);
#pragma unroll
            for (int b = 1; b < BLOCKS; ++b) top[n][i] = fmaxf(top[n][i], fmaxf(s[b][n][i], s[b][n][i + 2]));
            over |= top[n][i] > acc.limit[n][i];
        }
    if (__any_sync(~0u, over)) raise(queries, top, acc);
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = 0.f;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& cell = s[b][n][half * 2 + i];
                    cell = exp2_approximate(fmaf(cell, queries.scale_of(n, i), -acc.anchor[n][i]));
                }
                const float pair = s[b][n][i] + s[b][n][i + 2];
                sum = b == 0 ? pair : sum + pair;
            }
            acc.sum[n][i] += sum;
        }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                probability[b][n][i] = transpose_8x8(MMA_FP16 ? pack_fp16(s[b][n][i * 2], s[b][n][i * 2 + 1])
                                                              : pack_bf16(s[b][n][i * 2], s[b][n][i * 2 + 1]));
}

// O^T += V^T P^T over the tile's tokens, if EDGE those in [low, high) alone. Others may hold NaN, and 0 x NaN is NaN: their
// bits are masked to zero.
template <bool EDGE>
DEVICE void multiply_values(uint32_t values, int low, int high, const uint32_t (&probability)[BLOCKS][ROW_TILES][2],
                            Accumulator& acc) {
    const int lane = threadIdx.x % 32;
    constexpr int STEPS = TOKEN_BYTES / 32;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        uint32_t keep[2] = {~0u, ~0u};  // of the tokens 2 (lane % 4) + {0, 1}, and those 8 on
        if constexpr (EDGE) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int pair = b * BLOCK_TOKENS + warp_first_token() + i * 8 + lane % 4 * 2;
                keep[i] = (pair >= low && pair < high ? 0x0000ffffu : 0u) | (pair + 1 >= low && pair + 1 < high ? 0xffff0000u : 0u);
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint32_t raw[4];
            load_matrix_x4_transposed(raw, step_address(values, step, b));
            if constexpr (KV_E4M3) {  // tokens 0-7 of 16 dims and of the next 16, then tokens 8-15
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (EDGE) raw[i] &= keep[i / 2];
                    raw[i] = __byte_perm(raw[i], 0, 0x3120);  // both tokens of the even dim, then of the odd one
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t v[4];
                    e4m3_to_fp16(raw[half], v[0], v[1]);
                    e4m3_to_fp16(raw[half + 2], v[2], v[3]);
#pragma unroll
                    for (int n = 0; n < ROW_TILES; ++n)
                        multiply(acc.out[n][step * 2 + half], v, probability[b][n][0], probability[b][n][1]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (EDGE) raw[i] &= keep[i / 2];
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) multiply(acc.out[n][step], raw, probability[b][n][0], probability[b][n][1]);
            }
        }
    }
}

// The warps' accumulators become shared.merge (unnormalised O, to be added over its buffers), maximum and sum.
DEVICE void merge_warps(Accumulator& acc, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % PARTIES;
    float maximum[ROW_TILES][2];
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            maximum[n][i] = acc.limit[n][i] == -INFINITY ? -INFINITY : acc.anchor[n][i];
            for (int step = 4; step < 32; step *= 2) acc.sum[n][i] += __shfl_xor_sync(~0u, acc.sum[n][i], step);
            const int row = first_row(n) + lane % 4 * 2 + i;
            if (lane < 4) {
                shared.party_maximum[warp][row] = maximum[n][i];
                shared.party_sum[warp][row] = acc.sum[n][i];
            }
        }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row(n) + lane % 4 * 2 + i;
            float highest = shared.party_maximum[0][row];
            for (int w = 1; w < PARTIES; ++w) highest = fmaxf(highest, shared.party_maximum[w][row]);
            const float anchor = highest == -INFINITY ? 0.f : highest;  // no visible key: every weight is 0, not NaN
            const float weight = exp2_approximate(maximum[n][i] - anchor);
#pragma unroll
            for (int d = 0; d < DEPTH_STEPS; ++d) acc.out[n][d][i] *= weight, acc.out[n][d][i + 2] *= weight;
            if (warp == 0 && lane < 4) {
                float total = 0.f;
                for (int w = 0; w < PARTIES; ++w)
                    total += shared.party_sum[w][row] * exp2_approximate(shared.party_maximum[w][row] - anchor);
                shared.maximum[row] = highest;
                shared.sum[row] = total;
            }
        }
    // Warps that share a buffer take turns, so that the order of the additions is fixed.
    for (int turn = 0; turn < PARTIES / MERGE_BUFFERS; ++turn) {
        if (turn == warp / MERGE_BUFFERS)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int d = 0; d < DEPTH_STEPS; ++d)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float& cell = shared.merge[warp % MERGE_BUFFERS][first_row(n) + lane % 4 * 2 + i % 2][dim_of(d, i)];
                        cell = turn == 0 ? acc.out[n][d][i] : cell + acc.out[n][d][i];
                    }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    }
}

DEVICE void release(Shared& shared, const RingCursor& cursor) {
#if USE_TMA
    fence_async_proxy();  // what this warp has read, or is reading, comes before what a bulk copy writes there
#endif
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[cursor.index]));
}

// The keys and values at the cursor, of a tile that begins at key `tile_token`. EDGE: some rows do not see some of it.
template <bool EDGE>
DEVICE void take_tile(const Piece& piece, int tile_token, const Queries& queries, const LaneOffsets& offsets,
                      RingCursor& cursor, Shared& shared, Accumulator& acc) {
    float s[BLOCKS][ROW_TILES][4];
    mbarrier_wait(shared_address(&shared.full[cursor.index]), cursor.phase);
    multiply_keys(shared_address(shared.ring[cursor.index]) + offsets.keys, queries, shared, s);
    release(shared, cursor);
    cursor.advance();
    if constexpr (EDGE) hide(piece, tile_token, shared, s);
    uint32_t probability[BLOCKS][ROW_TILES][2];
    softmax(queries, s, acc, probability);
    mbarrier_wait(shared_address(&shared.full[cursor.index]), cursor.phase);
    multiply_values<EDGE>(shared_address(shared.ring[cursor.index]) + offsets.values, piece.begin - tile_token,
                          piece.request.length - tile_token, probability, acc);
    release(shared, cursor);
    cursor.advance();
}

DEVICE void consume(const Params& p, const Share& share, Shared& shared) {
    const float softmax_scale = p.softmax_scale_log2 * device_factor(p.softmax_scale_device);
    const float output_scale = p.output_scale * device_factor(p.output_scale_device);
    const LaneOffsets offsets;
    RingCursor cursor;
    for_each_piece(p, share, [&](const Piece& piece) {
        const Request& r = piece.request;
        Queries queries;
        queries.load(p, piece, softmax_scale, shared);
        const Parts parts = parts_of(p, share, piece);  // while the keys are on their way
        Accumulator acc;
        acc.clear();
        // Keys [seen_from, seen_to) are seen by every row.
        const int seen_to = r.length - r.q_len, seen_from = p.window_left < 0 ? 0 : r.length - 1 - p.window_left;
        const int end = end_of_keys(piece);
        for (int tile = piece.first; tile < end; ++tile) {
            const int tile_token = (r.first_tile + tile) * TILE_TOKENS;
            if (tile_token >= seen_from && tile_token + TILE_TOKENS <= seen_to)
                take_tile<false>(piece, tile_token, queries, offsets, cursor, shared, acc);
            else
                take_tile<true>(piece, tile_token, queries, offsets, cursor, shared, acc);
        }
        merge_warps(acc, shared);
#if USE_TMA
        if (p.cluster_size_log2 > 0) return merge_in_cluster(p, piece.rows, output_scale, shared);
#endif
        write_piece(p, piece, parts, output_scale, shared);
        if (parts.count == 1) return;
        merge_if_last(p, piece.rows, parts, arrive(p, parts), output_scale, shared);
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // shared.arrived_last and the weights are free again
    });
}

}  // namespace paged_decode
