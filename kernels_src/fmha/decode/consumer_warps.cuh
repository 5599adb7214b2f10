// Consumers of few rows: warps that each take a quarter of a KV tile's tokens, 16 of every 64. Queries as MMA
// fragments, S^T = K Q^T, softmax, O^T += V^T P^T, then the merge of the warps.
#pragma once
#include "epilogue.cuh"
#include "queries.cuh"

namespace paged_decode {

// A KV tile is processed in blocks of 64 tokens, of which each warp takes 16.
constexpr int BLOCK_TOKENS = 16 * KV_PARTITIONS;
constexpr int BLOCKS = TILE_TOKENS / BLOCK_TOKENS;
static_assert(BLOCKS * BLOCK_TOKENS == TILE_TOKENS, "a tile is a whole number of blocks");
// Chains of accumulation that hide the latency of Q K^T; the order of the additions does not depend on ROWS.
constexpr int CHAINS = 2;

// A warp's softmax state. For each of the thread's two rows of a row tile: `anchor` is subtracted from base-2 exponents
// (a maximum so far), a score above `limit` needs a new anchor (-inf: nothing visible so far), `sum` is over this
// thread's tokens. `out` is O^T (rows 2 (lane % 4) + {0, 1}; head dims: see dim_of).
struct Accumulator {
    float anchor[ROW_TILES][2];
    float limit[ROW_TILES][2];
    float sum[ROW_TILES][2];
    float out[ROW_TILES][K_STEPS][4];
    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) anchor[n][i] = sum[n][i] = 0.f, limit[n][i] = -INFINITY;
#pragma unroll
            for (int d = 0; d < K_STEPS; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][d][i] = 0.f;
        }
    }
};

// The head dim of accumulator element i of a 16-dim step. Each 16-bit matrix element holds two neighbouring e4m3, so
// that a fragment's upper rows are the even dims and its lower rows the odd ones.
DEVICE int dim_of(int step, int i) {
    const int lane = threadIdx.x % 32;
    return step * 16 + (KV_E4M3 ? lane / 4 * 2 + i / 2 : lane / 4 + i / 2 * 8);
}

// The first row of a warp's row tile n among the CTA's.
DEVICE int first_row(int n) { return (threadIdx.x / (32 * KV_PARTITIONS) * ROW_TILES + n) * 8; }

// One 16-dim step of a row tile's queries as the B operand: k = 2 (lane % 4) + {0, 1} and those + 8.
using QueryFragment = uint2;

// Passes the fragments of eight rows from `row_base` on to store(step, fragment); `flip` flips their signs. Returns the
// factor that undoes the scaling of this lane's row, row_base + lane / 4, into fp16.
template <class Store>
DEVICE float load_query(const Params& p, const WorkTile& work, int row_base, uint32_t flip, Store store) {
    const int lane = threadIdx.x % 32;
    const int row = row_base + lane / 4;
    const bool exists = row < work.rows.count;
    const char* at = query_row(p, work, exists ? row : 0);
    if constexpr (!KV_E4M3) {
        at += lane % 4 * 4;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            store(step, exists ? make_uint2(*reinterpret_cast<const uint32_t*>(at + step * 32) ^ flip,
                                            *reinterpret_cast<const uint32_t*>(at + step * 32 + 16) ^ flip)
                               : make_uint2(0, 0));
        return 1.f;
    } else {
        // The order of k matches the key fragments of multiply_keys: four neighbouring dims per lane. All loads
        // are in flight together.
        constexpr int BATCH = K_STEPS < 16 ? K_STEPS : 16;
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
        if (K_STEPS > BATCH && p.q_type == TYPE_BF16) {
            float largest = 0.f;
#pragma unroll 4
            for (int step = 0; step < K_STEPS; ++step) {
                const uint2 raw = load(step);
                largest = fmaxf(largest, fmaxf(largest_of(raw.x), largest_of(raw.y)));
            }
            exponent = common_exponent(largest);
        }
#pragma unroll
        for (int first = 0; first < K_STEPS; first += BATCH) {
            uint2 raw[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) raw[i] = load(first + i);
            if (p.q_type == TYPE_BF16) {
                if (K_STEPS <= BATCH) {
                    float largest = 0.f;
#pragma unroll
                    for (int i = 0; i < BATCH; ++i)
                        largest = fmaxf(largest, fmaxf(largest_of(raw[i].x), largest_of(raw[i].y)));
                    exponent = common_exponent(largest);
                }
                const float scale = power_of_two(-exponent);
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const float2 low = unpack_bf16(raw[i].x), high = unpack_bf16(raw[i].y);
                    raw[i] =
                        make_uint2(pack_fp16(low.x * scale, low.y * scale), pack_fp16(high.x * scale, high.y * scale));
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

// The queries of a work tile as fragments, in registers or shared memory, and what each row sees. load() ends with a
// barrier of the consumers.
struct Queries {
    QueryFragment own[QUERY_IN_SHARED ? 1 : ROW_TILES][QUERY_IN_SHARED ? 1 : K_STEPS];
    // Positive factors of the scores of the thread's rows. A negative softmax scale flips the queries' signs
    // instead, and a scale of 0 becomes tiny, since 0 times the -inf of a masked key is NaN.
    float scale[KV_E4M3 ? ROW_TILES : 1][KV_E4M3 ? 2 : 1];

    DEVICE float scale_of(int n, int i) const { return scale[KV_E4M3 ? n : 0][KV_E4M3 ? i : 0]; }

    DEVICE void load(const Params& p, const WorkTile& work, float softmax_scale, SharedStorage& shared) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (threadIdx.x < ROWS) {
            const int token = coordinates_of(p, work.rows.first + threadIdx.x).token;
            const Request& r = work.request;
            const bool exists = threadIdx.x < work.rows.count && follows_keys(p, r, token);
            shared.row_mask[threadIdx.x] = exists ? visible_drafts(p, r, token) : 0;
            shared.row_begin[threadIdx.x] = exists ? window_begin(p, r, token) : NEVER_VISIBLE;
        }
        const uint32_t flip = softmax_scale < 0.f ? 0x80008000u : 0u;
        const float magnitude = fabsf(softmax_scale);
        if constexpr (QUERY_IN_SHARED) {
            for (int n = warp; n < ROWS / 8; n += CONSUMER_WARPS) {
                const float unscale = load_query(p, work, n * 8, flip,
                                                 [&](int step, QueryFragment f) { shared.query[n][step][lane] = f; });
                if (KV_E4M3 && lane % 4 == 0) shared.row_unscale[n * 8 + lane / 4] = unscale;
            }
        } else {
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) {
                const float unscale =
                    load_query(p, work, n * 8, flip, [&](int step, QueryFragment f) { own[n][step] = f; });
                if constexpr (KV_E4M3)
                    for (int i = 0; i < 2; ++i)
                        scale[n][i] = fmaxf(magnitude * __shfl_sync(~0u, unscale, (lane % 4 * 2 + i) * 4), 1e-37f);
            }
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        if constexpr (!KV_E4M3) {
            scale[0][0] = fmaxf(magnitude, 1e-37f);
        } else if constexpr (QUERY_IN_SHARED) {
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
                for (int i = 0; i < 2; ++i)
                    scale[n][i] = fmaxf(magnitude * shared.row_unscale[first_row(n) + lane % 4 * 2 + i], 1e-37f);
        }
    }

    DEVICE QueryFragment get(const SharedStorage& shared, int n, int step) const {
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

DEVICE int warp_first_token() { return threadIdx.x / 32 % KV_PARTITIONS * 16; }

// Where a lane's 16 bytes of keys and of values begin in a stage, for the warp's first block and the first 32 bytes.
struct LaneOffsets {
    uint32_t keys, values;
    DEVICE LaneOffsets() {
        const int lane = threadIdx.x % 32;
        keys = tile_address(0, warp_first_token() + lane % 16, lane / 16);
        values = tile_address(0, warp_first_token() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
};

// The address of a token's 32 bytes number `step`, given that of the first; the next block is BLOCK_TOKENS further.
DEVICE uint32_t step_address(uint32_t first, int step, int block) {
    return (first ^ (step * 32 % SPAN)) + step * 32 / SPAN * SPAN_BYTES + block * BLOCK_TOKENS * SPAN;
}

// S^T of the warp's blocks, not yet scaled.
DEVICE void multiply_keys(uint32_t keys, const Queries& queries, const SharedStorage& shared,
                          float (&s)[BLOCKS][ROW_TILES][4]) {
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
            ldmatrix_x4(raw, step_address(keys, step, b));
            if constexpr (KV_E4M3) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t k[4];
                    e4m3_to_fp16(raw[half * 2], k[0], k[2]);
                    e4m3_to_fp16(raw[half * 2 + 1], k[1], k[3]);
#pragma unroll
                    for (int n = 0; n < ROW_TILES; ++n)
                        multiply(chain[half % CHAINS][b][n], k, q[half][n].x, q[half][n].y);
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

// Masks what rows do not see in a KV tile that begins at key `tile_token`.
DEVICE void mask_scores(const WorkTile& work, int tile_token, const SharedStorage& shared,
                        float (&s)[BLOCKS][ROW_TILES][4]) {
    const int lane = threadIdx.x % 32;
    const int prefix = work.request.kv_len - work.request.q_len;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row(n) + lane % 4 * 2 + i;
            const int begin = shared.row_begin[row];
            const DraftMask mask = shared.row_mask[row];
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int token = tile_token + b * BLOCK_TOKENS + warp_first_token() + lane / 4 + half * 8;
                    const bool visible = token < work.request.kv_len && token >= begin &&
                                         (token < prefix || (mask >> (token - prefix) & 1));
                    if (!visible) s[b][n][half * 2 + i] = -INFINITY;
                }
        }
}

// Rescales the accumulator to new maxima, for the rows that need one. `top` is the largest score of each of the
// thread's rows.
DEVICE void raise_maxima(const Queries& queries, float (&top)[ROW_TILES][2], Accumulator& acc) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
        float rescale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int step = 4; step < 32; step *= 2)
                top[n][i] = fmaxf(top[n][i], __shfl_xor_sync(~0u, top[n][i], step));
            const float limit = acc.limit[n][i], before = acc.anchor[n][i];
            if (top[n][i] > limit) {
                acc.anchor[n][i] = top[n][i] * queries.scale_of(n, i);
                acc.limit[n][i] = fmaxf((acc.anchor[n][i] + MAXIMUM_SLACK) / queries.scale_of(n, i), -3e38f);
            }
            rescale[i] = limit == -INFINITY ? 0.f : exp2_approximate(before - acc.anchor[n][i]);
            acc.sum[n][i] *= rescale[i];
        }
#pragma unroll
        for (int d = 0; d < K_STEPS; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc.out[n][d][i] *= rescale[i % 2];
    }
}

// Turns S^T into P^T as the B operand of P V. A maximum is kept until a score exceeds it by MAXIMUM_SLACK, so that most
// tiles need no reduction over the lanes. Each row's maxima depend on its own scores alone.
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
    if (__any_sync(~0u, over)) raise_maxima(queries, top, acc);
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
                const float block_sum = s[b][n][i] + s[b][n][i + 2];
                sum = b == 0 ? block_sum : sum + block_sum;
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

// O^T += V^T P^T over the tile's tokens; with EDGE only over those in [low, high). The others may hold NaN, and 0 x NaN
// is NaN, so their bits are masked to zero.
template <bool EDGE>
DEVICE void multiply_values(uint32_t values, int low, int high, const uint32_t (&probability)[BLOCKS][ROW_TILES][2],
                            Accumulator& acc) {
    const int lane = threadIdx.x % 32;
    constexpr int STEPS = TOKEN_BYTES / 32;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        uint32_t keep[2] = {~0u, ~0u};  // of tokens 2 (lane % 4) + {0, 1}, and those + 8
        if constexpr (EDGE) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = b * BLOCK_TOKENS + warp_first_token() + i * 8 + lane % 4 * 2;
                keep[i] = (token >= low && token < high ? 0x0000ffffu : 0u) |
                          (token + 1 >= low && token + 1 < high ? 0xffff0000u : 0u);
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint32_t raw[4];
            ldmatrix_x4_trans(raw, step_address(values, step, b));
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
                for (int n = 0; n < ROW_TILES; ++n)
                    multiply(acc.out[n][step], raw, probability[b][n][0], probability[b][n][1]);
            }
        }
    }
}

// Writes the warps' accumulators to shared.merge (unnormalised O, to be summed over the merge buffers), maximum and
// sum.
DEVICE void merge_warps(Accumulator& acc, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % KV_PARTITIONS;
    float maximum[ROW_TILES][2];
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            maximum[n][i] = acc.limit[n][i] == -INFINITY ? -INFINITY : acc.anchor[n][i];
            for (int step = 4; step < 32; step *= 2) acc.sum[n][i] += __shfl_xor_sync(~0u, acc.sum[n][i], step);
            const int row = first_row(n) + lane % 4 * 2 + i;
            if (lane < 4) {
                shared.partition_maximum[warp][row] = maximum[n][i];
                shared.partition_sum[warp][row] = acc.sum[n][i];
            }
        }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row(n) + lane % 4 * 2 + i;
            float highest = shared.partition_maximum[0][row];
            for (int w = 1; w < KV_PARTITIONS; ++w) highest = fmaxf(highest, shared.partition_maximum[w][row]);
            const float anchor = highest == -INFINITY ? 0.f : highest;  // no visible key: every weight is 0, not NaN
            const float weight = exp2_approximate(maximum[n][i] - anchor);
#pragma unroll
            for (int d = 0; d < K_STEPS; ++d) acc.out[n][d][i] *= weight, acc.out[n][d][i + 2] *= weight;
            if (warp == 0 && lane < 4) {
                float total = 0.f;
                for (int w = 0; w < KV_PARTITIONS; ++w)
                    total += shared.partition_sum[w][row] * exp2_approximate(shared.partition_maximum[w][row] - anchor);
                shared.maximum[row] = highest;
                shared.sum[row] = total;
            }
        }
    // Warps that share a buffer add one after the other, so that the order of the additions is fixed.
    for (int round = 0; round < KV_PARTITIONS / MERGE_BUFFERS; ++round) {
        if (round == warp / MERGE_BUFFERS)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int d = 0; d < K_STEPS; ++d)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float& cell =
                            shared.merge[warp % MERGE_BUFFERS][first_row(n) + lane % 4 * 2 + i % 2][dim_of(d, i)];
                        cell = round == 0 ? acc.out[n][d][i] : cell + acc.out[n][d][i];
                    }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    }
}

DEVICE void release(SharedStorage& shared, const StageState& state) {
#if USE_TMA
    // orders this warp's reads, which may still be in flight, before the TMA write that reuses the stage
    fence_async_proxy();
#endif
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[state.index]));
}

// The keys and values at the pipeline state, of a KV tile that begins at key `tile_token`. EDGE: some row does not see
// all of it.
template <bool EDGE>
DEVICE void take_tile(const WorkTile& work, int tile_token, const Queries& queries, const LaneOffsets& offsets,
                      StageState& state, SharedStorage& shared, Accumulator& acc) {
    float s[BLOCKS][ROW_TILES][4];
    mbarrier_wait(shared_address(&shared.full[state.index]), state.phase);
    multiply_keys(shared_address(shared.stages[state.index]) + offsets.keys, queries, shared, s);
    release(shared, state);
    state.advance();
    if constexpr (EDGE) mask_scores(work, tile_token, shared, s);
    uint32_t probability[BLOCKS][ROW_TILES][2];
    softmax(queries, s, acc, probability);
    mbarrier_wait(shared_address(&shared.full[state.index]), state.phase);
    multiply_values<EDGE>(shared_address(shared.stages[state.index]) + offsets.values, work.begin - tile_token,
                          work.request.kv_len - tile_token, probability, acc);
    release(shared, state);
    state.advance();
}

DEVICE void consume(const Params& p, const WorkRange& range, SharedStorage& shared) {
    float softmax_scale = p.softmax_scale_log2 * device_scale(p.softmax_scale_device);
    float output_scale = p.output_scale * device_scale(p.output_scale_device);
#if KV_E4M3
    const float launch_softmax_scale = softmax_scale, launch_output_scale = output_scale;
#endif
    const LaneOffsets offsets;
    StageState state;
    for_each_work_tile(p, range, [&](const WorkTile& work) {
        const Request& r = work.request;
#if KV_E4M3
        softmax_scale = launch_softmax_scale * key_scale(p, work);
        output_scale = launch_output_scale * value_scale(p, work);
#endif
        Queries queries;
        queries.load(p, work, softmax_scale, shared);
        const SplitSet splits = stream_k::splits_of<DecodeTiling>(p, range, work);  // while the keys are in flight
        Accumulator acc;
        acc.clear();
        // Keys [visible_from, visible_to) are visible to every row.
        const int visible_to = r.kv_len - r.q_len, visible_from = visible_to_all_from(p, r);
        const int end = end_tile(work);
        for (int tile = work.first; tile < end; ++tile) {
            const int tile_token = (r.first_tile + tile) * TILE_TOKENS;
            if (tile_token >= visible_from && tile_token + TILE_TOKENS <= visible_to)
                take_tile<false>(work, tile_token, queries, offsets, state, shared, acc);
            else
                take_tile<true>(work, tile_token, queries, offsets, state, shared, acc);
        }
        merge_warps(acc, shared);
#if USE_TMA
        if (merges_in_cluster(p, range)) return merge_in_cluster(p, work.rows, output_scale, shared);
#endif
        store_work_tile(p, work, splits, output_scale, shared);
        if (splits.count == 1) return;
        merge_if_last(p, work.rows, splits, arrive(p, splits), output_scale, shared);
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // the weights may be overwritten
    });
}

}  // namespace paged_decode
