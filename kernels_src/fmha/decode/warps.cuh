// Consumers of few rows: warps that each take 16 of a tile's tokens. Queries as MMA fragments, S^T = K Q^T, softmax,
// O^T += V^T P^T, and the meeting of the warps.
#pragma once
#include "combine.cuh"
#include "queries.cuh"

namespace paged_decode {

constexpr int WARP_TOKENS = TILE_TOKENS / PARTIES;
static_assert(WARP_TOKENS == 16, "a consumer warp takes one 16-token MMA tile");

// What one warp knows of one pair: for each of the thread's two rows of a row tile, the maximum (base-2 exponents), the
// sum of this thread's tokens, and O^T (rows 2 (lane % 4) + {0, 1}; head dims: see dim_of).
struct Accumulator {
    float maximum[ROW_TILES][2];
    float sum[ROW_TILES][2];
    float out[ROW_TILES][DEPTH_STEPS][4];
    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) maximum[n][i] = -INFINITY, sum[n][i] = 0.f;
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

// The fragments of eight rows from `row_base` on (of the piece's), through store(step, fragment). Returns the factor that
// undoes what was done to this lane's row, row_base + lane / 4, to bring it into fp16.
template <class Store>
DEVICE float load_query(const Params& p, const Piece& piece, int row_base, Store store) {
    const int lane = threadIdx.x % 32;
    const int row = row_base + lane / 4;
    const bool exists = row < piece.rows.count;
    const char* at = query_row(p, piece, exists ? row : 0);
    if constexpr (!KV_E4M3) {
        at += lane % 4 * 4;
        for (int step = 0; step < DEPTH_STEPS; ++step)
            store(step, exists ? make_uint2(*reinterpret_cast<const uint32_t*>(at + step * 32),
                                            *reinterpret_cast<const uint32_t*>(at + step * 32 + 16))
                               : make_uint2(0, 0));
        return 1.f;
    } else {
        float largest = 0.f;
        if (p.q_type == BF16 && exists)
            for (int i = 0; i < HEAD_DIM / 8; ++i) {
                const float2 value = query_values(p, at, i * 8 + lane % 4 * 2);
                largest = fmaxf(largest, fmaxf(fabsf(value.x), fabsf(value.y)));
            }
        const int exponent = common_exponent(largest);
        const float scale = power_of_two(-exponent);
        // Depths follow the key fragments of multiply_keys: four dims of a lane in a row.
        for (int step = 0; step < DEPTH_STEPS; ++step) {
            uint32_t words[2] = {0, 0};
            for (int i = 0; i < 2 && exists; ++i) {
                const float2 value = query_values(p, at, step * 16 + lane % 4 * 4 + i * 2);
                words[i] = pack_fp16(value.x * scale, value.y * scale);
            }
            store(step, make_uint2(words[0], words[1]));
        }
        return power_of_two(exponent);
    }
}

// Queries of a piece where the consumers need them, and what each row sees. Ends with a barrier of the consumers.
struct Queries {
    QueryFragment own[QUERY_IN_SHARED ? 1 : ROW_TILES][QUERY_IN_SHARED ? 1 : DEPTH_STEPS];

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
        if constexpr (QUERY_IN_SHARED) {
            for (int n = warp; n < ROWS / 8; n += CONSUMER_WARPS) {
                const float undo = load_query(p, piece, n * 8, [&](int step, QueryFragment f) { shared.query[n][step][lane] = f; });
                if (KV_E4M3 && lane % 4 == 0) shared.row_scale[n * 8 + lane / 4] = undo * softmax_scale;
            }
        } else {
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) {
                const float undo = load_query(p, piece, n * 8, [&](int step, QueryFragment f) { own[n][step] = f; });
                if (KV_E4M3 && warp == 0 && lane % 4 == 0) shared.row_scale[n * 8 + lane / 4] = undo * softmax_scale;
            }
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
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

DEVICE int warp_first_token() { return threadIdx.x / 32 % PARTIES * WARP_TOKENS; }

// S^T of the warp's 16 tokens.
DEVICE void multiply_keys(uint32_t buffer, const Queries& queries, const Shared& shared, float (&s)[ROW_TILES][4]) {
    const int lane = threadIdx.x % 32;
    const int token = warp_first_token() + lane % 16;
    // Two chains of accumulation hide the latency of the MMA.
    float odd[ROW_TILES][4];
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0.f;
    if constexpr (KV_E4M3) {
#pragma unroll
        for (int pair = 0; pair < DEPTH_STEPS / 2; ++pair) {
            uint32_t raw[4];  // tokens 0-7 and 8-15 of 16 dims, then of the next 16
            load_matrix_x4(raw, tile_address(buffer, token, pair * 2 + lane / 16));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t upper = raw[half * 2], lower = raw[half * 2 + 1];
                const uint32_t k[4] = {e4m3_pair_to_fp16(upper), e4m3_pair_to_fp16(lower), e4m3_pair_to_fp16(upper >> 16),
                                       e4m3_pair_to_fp16(lower >> 16)};
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) {
                    const QueryFragment q = queries.get(shared, n, pair * 2 + half);
                    multiply(half ? odd[n] : s[n], k, q.x, q.y);
                }
            }
        }
    } else {
#pragma unroll
        for (int step = 0; step < DEPTH_STEPS; ++step) {
            uint32_t k[4];
            load_matrix_x4(k, tile_address(buffer, token, step * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) {
                const QueryFragment q = queries.get(shared, n, step);
                multiply(step % 2 ? odd[n] : s[n], k, q.x, q.y);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
}

// Hides what rows must not see, in a tile that begins at key `tile_token`.
DEVICE void hide(const Piece& piece, int tile_token, const Shared& shared, float (&s)[ROW_TILES][4]) {
    const int lane = threadIdx.x % 32;
    const int prefix = piece.request.length - piece.request.q_len;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first_row(n) + lane % 4 * 2 + i % 2;
            const int token = tile_token + warp_first_token() + lane / 4 + i / 2 * 8;
            const bool visible = token < piece.request.length && token >= shared.row_begin[row] &&
                                 (token < prefix || (shared.row_mask[row] >> (token - prefix) & 1));
            if (!visible) s[n][i] = -INFINITY;
        }
}

// Turns S^T into P^T as the B operand of the second product, and brings the accumulator to the new maximum.
DEVICE void softmax(float (&s)[ROW_TILES][4], Accumulator& acc, uint32_t (&probability)[ROW_TILES][2]) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
        float rescale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = fmaxf(s[n][i], s[n][i + 2]);
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            top = fmaxf(top, acc.maximum[n][i]);
            const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible so far: weights 0, not NaN
            rescale[i] = exp2_approximate(acc.maximum[n][i] - anchor);
            acc.maximum[n][i] = top;
            s[n][i] = exp2_approximate(s[n][i] - anchor);
            s[n][i + 2] = exp2_approximate(s[n][i + 2] - anchor);
            acc.sum[n][i] = acc.sum[n][i] * rescale[i] + s[n][i] + s[n][i + 2];
        }
        if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f))
#pragma unroll
            for (int d = 0; d < DEPTH_STEPS; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc.out[n][d][i] *= rescale[i % 2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            probability[n][i] = transpose_8x8(MMA_FP16 ? pack_fp16(s[n][i * 2], s[n][i * 2 + 1])
                                                       : pack_bf16(s[n][i * 2], s[n][i * 2 + 1]));
    }
}

// O^T += V^T P^T over the tile's tokens [low, high). Others may hold NaN, and 0 x NaN is NaN: their bits are masked to zero.
DEVICE void multiply_values(uint32_t buffer, int low, int high, const uint32_t (&probability)[ROW_TILES][2], Accumulator& acc) {
    const int lane = threadIdx.x % 32;
    const int first = warp_first_token();
    const int token = first + lane / 16 * 8 + lane % 8;
    const bool whole = low <= first && first + WARP_TOKENS <= high;
    uint32_t keep[2];  // of the tokens 2 (lane % 4) + {0, 1}, and those 8 on
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int pair = first + i * 8 + lane % 4 * 2;
        keep[i] = (pair >= low && pair < high ? 0x0000ffffu : 0u) | (pair + 1 >= low && pair + 1 < high ? 0xffff0000u : 0u);
    }
    if constexpr (KV_E4M3) {
#pragma unroll
        for (int pair = 0; pair < DEPTH_STEPS / 2; ++pair) {
            uint32_t raw[4];  // tokens 0-7 of 16 dims and of the next 16, then tokens 8-15
            load_matrix_x4_transposed(raw, tile_address(buffer, token, pair * 2 + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (!whole) raw[i] &= keep[i / 2];
                raw[i] = __byte_perm(raw[i], 0, 0x3120);  // both tokens of the even dim, then of the odd one
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t upper = raw[half], lower = raw[half + 2];
                const uint32_t v[4] = {e4m3_pair_to_fp16(upper), e4m3_pair_to_fp16(upper >> 16), e4m3_pair_to_fp16(lower),
                                       e4m3_pair_to_fp16(lower >> 16)};
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
                    multiply(acc.out[n][pair * 2 + half], v, probability[n][0], probability[n][1]);
            }
        }
    } else {
#pragma unroll
        for (int d = 0; d < DEPTH_STEPS; ++d) {
            uint32_t v[4];
            load_matrix_x4_transposed(v, tile_address(buffer, token, d * 2 + lane / 8 % 2));
            if (!whole)
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] &= keep[i / 2];
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) multiply(acc.out[n][d], v, probability[n][0], probability[n][1]);
        }
    }
}

// The warps' accumulators become shared.merge (unnormalised O, to be added over its buffers), maximum and sum.
DEVICE void merge_warps(Accumulator& acc, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % PARTIES;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int step = 4; step < 32; step *= 2) acc.sum[n][i] += __shfl_xor_sync(~0u, acc.sum[n][i], step);
            const int row = first_row(n) + lane % 4 * 2 + i;
            if (lane < 4) {
                shared.party_maximum[warp][row] = acc.maximum[n][i];
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
            const float weight = exp2_approximate(acc.maximum[n][i] - anchor);
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

DEVICE void consume(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int first_token = warp_first_token();
    const float softmax_scale = p.softmax_scale_log2 * device_factor(p.softmax_scale_device);
    const float output_scale = p.output_scale * device_factor(p.output_scale_device);
    RingCursor cursor;
    for_each_piece(p, share, [&](const Piece& piece) {
        const Request& r = piece.request;
        Queries queries;
        queries.load(p, piece, softmax_scale, shared);
        Accumulator acc;
        acc.clear();
        // Keys [seen_from, seen_to) are seen by every row.
        const int seen_to = r.length - r.q_len, seen_from = p.window_left < 0 ? 0 : r.length - 1 - p.window_left;
        for (int tile = piece.first; tile < piece.last; ++tile) {
            const int tile_token = (r.first_tile + tile) * TILE_TOKENS;
            const int low = max(piece.begin - tile_token, 0), high = min(r.length - tile_token, TILE_TOKENS);
            if (high <= 0) continue;
            const bool any = first_token < high && first_token + WARP_TOKENS > low;
            uint32_t probability[ROW_TILES][2];
            mbarrier_wait(shared_address(&shared.full[cursor.index]), cursor.phase);
            if (any) {
                float s[ROW_TILES][4];
                multiply_keys(shared_address(shared.ring[cursor.index]), queries, shared, s);
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        s[n][i] *= KV_E4M3 ? shared.row_scale[first_row(n) + lane % 4 * 2 + i % 2] : softmax_scale;
                if (tile_token + TILE_TOKENS > seen_to || tile_token < seen_from) hide(piece, tile_token, shared, s);
                softmax(s, acc, probability);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[cursor.index]));
            cursor.advance();
            mbarrier_wait(shared_address(&shared.full[cursor.index]), cursor.phase);
            if (any) multiply_values(shared_address(shared.ring[cursor.index]), low, high, probability, acc);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[cursor.index]));
            cursor.advance();
        }
        merge_warps(acc, shared);
        const Parts parts = parts_of(p, share, piece);
        write_piece(p, piece, parts, output_scale, shared);
        if (parts.count == 1) return;
        merge_if_last(p, piece.rows, parts, arrive(p, parts), output_scale, shared);
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // shared.arrived_last and the weights are free again
    });
}

}  // namespace paged_decode
