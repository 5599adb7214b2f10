// Consumers of batch-invariant decode with few rows, which get the bits that prefill gives them (common/segments.cuh).
// Each team of four warps has an equal part of the rows:
//
//   S^T = K Q^T   each warp 32 of a KV tile's 128 tokens     --> the warp's maxima  --> shared memory
//   P^T           by the maxima of all four, each its tokens --> P, sums of tokens  --> shared memory
//   O^T += V^T P^T   each warp all tokens and a quarter of head_dim
//
// The scores of the next tile come before the product of the last one, so that one barrier a tile is enough. At the end
// of a segment, O is folded into that of earlier segments or, where those belong to other CTAs, written as a partial.
// The CTA that arrives last folds all of them from the left.
//
// e4m3 keys and values become the type of the queries in registers, exactly but for NaN. Within the 16 columns of a
// step of Q K^T they lie in another order, as do the queries; that changes no bits.
#pragma once
#include "segment_partials.cuh"

namespace paged_decode {

constexpr int TEAM_WARPS = KV_PARTITIONS, TEAM = 32 * TEAM_WARPS;
constexpr int TEAM_BARRIER = CONSUMER_BARRIER + 1;  // and up, one for each team
constexpr int WARP_TOKENS = TILE_TOKENS / TEAM_WARPS, BLOCKS = WARP_TOKENS / 16;
constexpr int WARP_DIMS = HEAD_DIM / TEAM_WARPS, DIM_BLOCKS = WARP_DIMS / 16;
constexpr int FEW_PARTIALS = 12;  // more are copied to shared memory before they are folded
// Loads of keys, and of values, that are under way before the products that need them; more would spill.
constexpr int KEYS_AHEAD = HEAD_DIM == 128 ? 2 : 0, VALUES_AHEAD = HEAD_DIM == 128 ? 1 : 0;

// The thread's part of O^T: rows 2 (lane % 4) + {0, 1} of a row tile, and two dims of a block (dim_of_value).
using Output = float[ROW_TILES][DIM_BLOCKS][4];
using Scores = float[BLOCKS][ROW_TILES][4];  // tokens lane / 4 and those + 8 of a block, the same rows
using RowValues = float[ROW_TILES][2];

DEVICE int warp_of_team() { return threadIdx.x / 32 % TEAM_WARPS; }
DEVICE int first_team_row() { return threadIdx.x / TEAM * Exchange::TEAM_ROWS; }
// Of the thread's values of a row tile: the row within the team.
DEVICE int row_of_value(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i; }
// Of a block of 16 dims: lane / 4 and that + 8. A 16-bit element of a matrix of e4m3 holds two neighbouring dims.
DEVICE int dim_of_value(int i) {
    const int of_eight = threadIdx.x % 32 / 4;
    return KV_E4M3 ? of_eight * 2 + i : of_eight + i * 8;
}

DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (MMA_FP16)
        mma_fp16_16x8x16(d, a, b0, b1);
    else
        mma_bf16_16x8x16(d, a, b0, b1);
}

DEVICE void clear(Output& out) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][d][i] = 0.f;
}

// The queries of a work tile as fragments of the B operand, in registers or shared memory; k = 2 (lane % 4) + {0, 1}
// and those + 8, or for e4m3 keys 4 (lane % 4) + {0, 1, 2, 3}.
struct Queries {
    uint2 own[QUERY_IN_SHARED ? 1 : ROW_TILES][QUERY_IN_SHARED ? 1 : K_STEPS];

    // Also what each row sees. Ends with a barrier of the consumers.
    DEVICE void load(const Params& p, const WorkTile& work, SharedStorage& shared) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        find_visible_keys(p, work, shared);
        const auto fragment = [&](const char* row, bool exists, int step) {
            const char* at = row + step * 32 + lane % 4 * (KV_E4M3 ? 8 : 4);
            if constexpr (KV_E4M3) return exists ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
            return exists
                       ? make_uint2(*reinterpret_cast<const uint32_t*>(at), *reinterpret_cast<const uint32_t*>(at + 16))
                       : make_uint2(0, 0);
        };
        const int first = QUERY_IN_SHARED ? warp : 0, step_rows = QUERY_IN_SHARED ? CONSUMER_WARPS : 1;
#pragma unroll
        for (int n = first; n < (QUERY_IN_SHARED ? ROWS / 8 : ROW_TILES); n += step_rows) {
            const int row = n * 8 + lane / 4;
            const bool exists = row < work.rows.count;
            const char* at = query_row(p, work, exists ? row : 0);
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) {
                if constexpr (QUERY_IN_SHARED)
                    shared.query[n][step][lane] = fragment(at, exists, step);
                else
                    own[n][step] = fragment(at, exists, step);
            }
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    }

    DEVICE uint2 get(const SharedStorage& shared, int n, int step) const {
        if constexpr (QUERY_IN_SHARED)
            return shared.query[first_team_row() / 8 + n][step][threadIdx.x % 32];
        else
            return own[n][step];
    }
};

DEVICE void release(SharedStorage& shared, const StageState& state) {
    // orders this warp's reads, which may still be in flight, before the TMA write that reuses the stage
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[state.index]));
}

// The address of 32 bytes number `step`, given that of the first in a stage.
DEVICE uint32_t step_address(uint32_t first, int step) {
    return (first ^ (step * 32 % SPAN)) + step * 32 / SPAN * SPAN_BYTES;
}

// S^T of the warp's tokens.
DEVICE void multiply_keys(uint32_t stage, const Queries& queries, const SharedStorage& shared, Scores& s) {
    const int lane = threadIdx.x % 32;
    const uint32_t keys = stage + tile_address(0, warp_of_team() * WARP_TOKENS + lane % 16, lane / 16);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[b][n][i] = 0.f;
    constexpr int STEPS = KV_E4M3 ? 2 : 1;  // in 32 bytes
    constexpr int LOADS = K_STEPS / STEPS;
    static_assert(KEYS_AHEAD < LOADS, "the first loads exist");
    uint32_t loaded[KEYS_AHEAD + 1][BLOCKS][4];  // tokens 0-7 and 8-15 of 16 bytes, then of the next 16
    const auto load = [&](int number) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
            ldmatrix_x4(loaded[number % (KEYS_AHEAD + 1)][b], step_address(keys, number) + b * 16 * SPAN);
    };
#pragma unroll
    for (int ahead = 0; ahead < KEYS_AHEAD; ++ahead) load(ahead);
#pragma unroll
    for (int number = 0; number < LOADS; ++number) {
        if (number + KEYS_AHEAD < LOADS) load(number + KEYS_AHEAD);
#pragma unroll
        for (int half = 0; half < STEPS; ++half)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const uint32_t (&raw)[4] = loaded[number % (KEYS_AHEAD + 1)][b];
                uint32_t k[4] = {raw[0], raw[1], raw[2], raw[3]};
                if constexpr (KV_E4M3) {
                    convert_e4m3(raw[half * 2], k[0], k[2]);
                    convert_e4m3(raw[half * 2 + 1], k[1], k[3]);
                }
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) {
                    const uint2 q = queries.get(shared, n, number * STEPS + half);
                    multiply(s[b][n], k, q.x, q.y);
                }
            }
    }
}

// -inf where a row does not see the key, in a KV tile that begins at key `tile_token`.
DEVICE void mask(const WorkTile& work, int tile_token, const SharedStorage& shared, Scores& s) {
    const int first = tile_token + warp_of_team() * WARP_TOKENS + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const VisibleKeys sees(work, shared, first_team_row() + row_of_value(n, i), first);
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (!sees.key(b * 16 + half * 8)) s[b][n][half * 2 + i] = -INFINITY;
                }
        }
}

// The warp's largest score of each row, for the others.
DEVICE void tell_maxima(const Scores& s, float (&to)[Exchange::TEAM_ROWS]) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = fmaxf(s[0][n][i], s[0][n][i + 2]);
#pragma unroll
            for (int b = 1; b < BLOCKS; ++b) top = fmaxf(top, fmaxf(s[b][n][i], s[b][n][i + 2]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            if (threadIdx.x % 32 < 4) to[row_of_value(n, i)] = top;
        }
}

// Scores become probabilities to the maxima of all four warps, for all of them; `factor` is that of sums and outputs so
// far.
DEVICE void tell_probabilities(Scores& s, float scale, int turn, Exchange& exchange, RowValues& maximum,
                               RowValues& factor) {
    const int lane = threadIdx.x % 32, warp = warp_of_team();
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row_of_value(n, i);
            float highest = exchange.top[turn][0][row];
#pragma unroll
            for (int w = 1; w < TEAM_WARPS; ++w) highest = fmaxf(highest, exchange.top[turn][w][row]);
            highest = segments::raised(maximum[n][i], highest, scale);
            const float anchor = segments::anchor_of(highest, scale);
            factor[n][i] = segments::weight(maximum[n][i], highest, scale, anchor);
            maximum[n][i] = highest;
            float sum;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& cell = s[b][n][half * 2 + i];
                    cell = segments::probability(cell, scale, anchor);
                    sum = b + half == 0 ? cell : __fadd_rn(sum, cell);
                }
            exchange.sum[turn][row][warp * 8 + lane / 4] = sum;
            if (warp == 0 && lane < 4) exchange.raised[turn][row] = make_float2(factor[n][i], highest);
        }
        uint32_t p[4];  // of 8 tokens each
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = s[i / 2][n][i % 2 * 2], high = s[i / 2][n][i % 2 * 2 + 1];
            p[i] = MMA_FP16 ? pack_fp16(low, high) : pack_bf16(low, high);
        }
        stmatrix_x4_trans(
            shared_address(&exchange.probability[turn][n * 8 + lane % 8][warp * WARP_TOKENS + lane / 8 * 8]), p);
    }
}
static_assert(BLOCKS == 2, "four matrices of 8 tokens");

// O^T += V^T P^T for the warp's dims; with EDGE only over tokens in [low, high). The others may hold NaN, and 0 x NaN
// is NaN, so their bits are masked to zero.
template <bool EDGE>
DEVICE void multiply_values(uint32_t stage, int low, int high, const uint16_t (*probability)[TILE_TOKENS + 8],
                            Output& out) {
    const int lane = threadIdx.x % 32;
    // 16 tokens of 16 dims at a time; of e4m3 32 tokens.
    const uint32_t values =
        stage + (KV_E4M3 ? tile_address(0, lane, warp_of_team() * (WARP_DIMS / 16))
                         : tile_address(0, lane / 16 * 8 + lane % 8, warp_of_team() * (WARP_DIMS / 8) + lane / 8 % 2));
    constexpr int PAIRS = TILE_TOKENS / 32, STEPS = KV_E4M3 ? 1 : 2;  // loads of values for a pair of 16 tokens
    uint32_t p[VALUES_AHEAD + 1][ROW_TILES][4], loaded[VALUES_AHEAD + 1][STEPS][DIM_BLOCKS][4];
    const auto load = [&](int pair) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
            ldmatrix_x4(p[pair % (VALUES_AHEAD + 1)][n],
                        shared_address(&probability[n * 8 + lane % 8][pair * 32 + lane / 8 * 8]));
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; ++d)
                ldmatrix_x4_trans(loaded[pair % (VALUES_AHEAD + 1)][step][d],
                                  (values ^ (d * (KV_E4M3 ? 16 : 32))) + (pair * 32 + step * 16) * SPAN);
    };
#pragma unroll
    for (int ahead = 0; ahead < VALUES_AHEAD; ++ahead) load(ahead);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        if (pair + VALUES_AHEAD < PAIRS) load(pair + VALUES_AHEAD);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t keep[2] = {~0u, ~0u};  // of tokens 2 (lane % 4) + {0, 1}, and those + 8
            if constexpr (EDGE) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int own = pair * 32 + half * 16 + i * 8 + lane % 4 * 2;
                    keep[i] = (own >= low && own < high ? 0x0000ffffu : 0u) |
                              (own + 1 >= low && own + 1 < high ? 0xffff0000u : 0u);
                }
            }
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; ++d) {
                const uint32_t (&raw)[4] = loaded[pair % (VALUES_AHEAD + 1)][KV_E4M3 ? 0 : half][d];
                uint32_t v[4];
                if constexpr (KV_E4M3) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        // both tokens of the even dim, then of the odd one
                        convert_e4m3(__byte_perm(raw[half * 2 + i] & keep[i], 0, 0x3120), v[i * 2], v[i * 2 + 1]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) v[i] = raw[i] & keep[i / 2];
                }
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
                    multiply(out[n][d], v, p[pair % (VALUES_AHEAD + 1)][n][half * 2],
                             p[pair % (VALUES_AHEAD + 1)][n][half * 2 + 1]);
            }
        }
    }
}

// A thread's part of a partial lies where the same thread of another CTA reads it.
DEVICE float4* partial_of(const Params& p, int slot, int n, int d) {
    return static_cast<float4*>(p.partial_out) +
           (static_cast<int64_t>(slot * ROW_TILES + n) * DIM_BLOCKS + d) * CONSUMERS + threadIdx.x;
}

// The sums of a row in the thread that adds them up: the team's warp n has row tile n, four threads a row.
struct RowSums {
    float sum = 0.f;  // of tokens 2 (lane % 4) + {0, 1} modulo 8, in this segment
    Statistics folded;

    DEVICE static bool has_row() { return warp_of_team() < ROW_TILES; }
    DEVICE static int row() { return warp_of_team() * 8 + threadIdx.x % 32 / 4; }

    DEVICE void add(const Exchange& exchange, int turn) {
        float tile[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int w = 0; w < TEAM_WARPS; ++w) {
                const float part = exchange.sum[turn][row()][w * 8 + threadIdx.x % 4 * 2 + i];
                tile[i] = w == 0 ? part : __fadd_rn(tile[i], part);
            }
        sum = segments::next_sum(sum, exchange.raised[turn][row()].x, tile[0], tile[1]);
    }

    // Ends the segment, whose last tile is that of `turn`.
    DEVICE Statistics close(const Exchange& exchange, int turn) {
        const float total = segments::segment_sum(sum);
        sum = 0.f;
        return {exchange.raised[turn][row()].y, total};
    }

    DEVICE void fold(const Statistics& segment, float scale) {
        const segments::Fold fold = segments::fold_maximum(folded.maximum, segment.maximum, scale);
        folded.sum = fold(folded.sum, segment.sum);
    }
};

// What is folded of an output tile: its output, and maxima of the same rows.
struct Folded {
    Output out;
    RowValues maximum;

    DEVICE void clear() {
        paged_decode::clear(out);
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) maximum[n][0] = maximum[n][1] = -INFINITY;
    }

    DEVICE void fold(const RowValues& segment_maximum, const Output& segment, float scale) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const segments::Fold by[2] = {segments::fold_maximum(maximum[n][0], segment_maximum[n][0], scale),
                                          segments::fold_maximum(maximum[n][1], segment_maximum[n][1], scale)};
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][d][i] = by[i % 2](out[n][d][i], segment[n][d][i]);
        }
    }
};

DEVICE void write_partial(const Params& p, int slot, const WorkTile& work, const Output& out,
                          const Statistics& statistics) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d)
            *partial_of(p, slot, n, d) = make_float4(out[n][d][0], out[n][d][1], out[n][d][2], out[n][d][3]);
    if (RowSums::has_row() && threadIdx.x % 4 == 0)
        static_cast<float2*>(p.partial_statistics)[slot_row(slot, first_team_row() + RowSums::row())] =
            make_float2(statistics.maximum, statistics.sum);
}

// Writes the rows of the output, through shared memory.
DEVICE void finish(const Params& p, const WorkTile& work, float scale, float output_scale, const Folded& folded,
                   const Statistics& statistics, SharedStorage& shared) {
    const Rows& rows = work.rows;
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // all have read what the warps told each other
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                shared.merge[0][first_team_row() + row_of_value(n, i % 2)]
                            [warp_of_team() * WARP_DIMS + d * 16 + dim_of_value(i / 2)] = folded.out[n][d][i];
    const int own = first_team_row() + RowSums::row();
    if (RowSums::has_row() && threadIdx.x % 4 == 0 && own < rows.count) {
        const RowCoordinates at = coordinates_of(p, rows.first + own);
        const int head = rows.head * p.group + at.head;
        const float* sink = p.sinks == nullptr ? nullptr : static_cast<const float*>(p.sinks) + head;
        const segments::Normalisation n = segments::normalise(statistics, scale, sink, output_scale, true);
        shared.sum[own] = n.factor;
        if (p.lse != nullptr)
            static_cast<float*>(p.lse)[(rows.q_begin + at.token) * p.lse_token_stride + head * p.lse_head_stride] =
                n.lse;
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    constexpr int PIECES = HEAD_DIM / 4;
    for (int cell = threadIdx.x; cell < rows.count * PIECES; cell += CONSUMERS) {
        const int row = cell / PIECES, dim = cell % PIECES * 4;
        const RowCoordinates at = coordinates_of(p, rows.first + row);
        const float4 value = *reinterpret_cast<const float4*>(&shared.merge[0][row][dim]);
        const float factor = shared.sum[row];
        const int head = rows.head * p.group + at.head;
        write_row(p, (rows.q_begin + at.token) * p.out_token_stride + head * p.out_head_stride + dim,
                  make_float4(segments::normalised(value.x, factor), segments::normalised(value.y, factor),
                              segments::normalised(value.z, factor), segments::normalised(value.w, factor)));
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // the memory is free for the next work tile
}

// Partials that are folded, on their way to the memory of stages in groups.
struct PartialRing {
    static constexpr int BYTES = ROW_TILES * DIM_BLOCKS * CONSUMERS * 16;  // of a partial
    static constexpr int FITTING = STAGES * STAGE_BYTES / BYTES;
    static constexpr int GROUP = FITTING < 16 ? 4 : FITTING < 32 ? 8 : 16;  // partials
    static_assert(FITTING >= RING_GROUPS * GROUP, "partials lie in stages");

    SharedStorage& shared;
    int taken = 0;  // groups
    DEVICE explicit PartialRing(SharedStorage& shared) : shared(shared) {}

    // By one warp: begins to copy the group from `first` on of `count` partials, which will be taken after `ahead`
    // others. The lanes have the slots of 32 partials.
    DEVICE void begin(const Params& p, int first, int count, int slots, int ahead) const {
        const int lane = threadIdx.x % 32, slot = __shfl_sync(~0u, slots, (first + lane) % 32);
        count = min(GROUP, count - first);
        const int turn = (taken + ahead) % RING_GROUPS;
        if (count <= 0) return;
        const uint32_t full = shared_address(&shared.partials_full[turn]);
        if (lane == 0) mbarrier_arrive_expect_bytes(full, count * BYTES);
        __syncwarp();
        if (lane < count)
            bulk_copy(shared_address(shared.stages) + (turn * GROUP + lane) * BYTES,
                      static_cast<const char*>(p.partial_out) + static_cast<int64_t>(slot) * BYTES, BYTES, full);
    }

    // Waits for the next group. Returns this thread's part of its first partial.
    DEVICE const float4* take() {
        const int turn = taken % RING_GROUPS, parity = taken / RING_GROUPS % 2;
        mbarrier_wait(shared_address(&shared.partials_full[turn]), parity);
        ++taken;
        return reinterpret_cast<const float4*>(shared.stages) + turn * GROUP * (BYTES / 16) + threadIdx.x;
    }
};

// Folds all partials of an output tile from the left and writes its rows: for few of them, or where the producers
// already load keys of another output tile.
DEVICE void fold_few(const Params& p, const Partials& partials, const WorkTile& work, float scale, float output_scale,
                     SharedStorage& shared) {
    // As many float4 in flight as leave registers for the CTAs of a multiprocessor.
    constexpr int CELLS = CTAS_PER_SM > 2 ? 4 : 8, BATCH = CELLS / (ROW_TILES * DIM_BLOCKS);
    Folded folded;
    folded.clear();
    RowSums sums;
#pragma unroll 1
    for (int first = 0; first < partials.count; first += BATCH) {
        const int lane_slot = partials.slot(min(first + static_cast<int>(threadIdx.x) % BATCH, partials.count - 1));
        float4 loaded[BATCH][ROW_TILES][DIM_BLOCKS];
        RowValues maximum[BATCH];
        Statistics statistics[BATCH];
        const float2* all = static_cast<const float2*>(p.partial_statistics);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int slot = __shfl_sync(~0u, lane_slot, i);
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    maximum[i][n][j] = __ldcg(&all[slot_row(slot, first_team_row() + row_of_value(n, j))].x);
#pragma unroll
                for (int d = 0; d < DIM_BLOCKS; ++d) loaded[i][n][d] = __ldcg(partial_of(p, slot, n, d));
            }
            if (RowSums::has_row()) {
                const float2 own = __ldcg(all + slot_row(slot, first_team_row() + RowSums::row()));
                statistics[i] = {own.x, own.y};
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i >= partials.count) break;
            Output part;
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int d = 0; d < DIM_BLOCKS; ++d) {
                    const float4 four = loaded[i][n][d];
                    part[n][d][0] = four.x, part[n][d][1] = four.y, part[n][d][2] = four.z, part[n][d][3] = four.w;
                }
            folded.fold(maximum[i], part, scale);
            if (RowSums::has_row()) sums.fold(statistics[i], scale);
        }
    }
    finish(p, work, scale, output_scale, folded, sums.folded, shared);
}

// The same for many partials, when the CTA's stages are free. 32 at a time, whose factors the lanes compute together,
// because only maxima go into them; what is left for one after the other is a product and a sum.
DEVICE void fold_many(const Params& p, const Partials& partials, const WorkTile& work, float scale, float output_scale,
                      SharedStorage& shared) {
    constexpr int GROUP = PartialRing::GROUP, UNROLLED = 4, OWN_ROWS = ROWS / CONSUMER_WARPS;
    const int lane = threadIdx.x % 32, first_own = threadIdx.x / 32 * OWN_ROWS;
    PartialRing ring(shared);
    // Behind the last partial it comes again, which raises no maximum.
    const auto slot_of = [&](int partial) { return partials.slot(min(partial, partials.count - 1)); };
    int slots = slot_of(lane);  // of these 32 partials
    if (threadIdx.x < 32) {
        fence_async_proxy_global();
#pragma unroll 1
        for (int i = 0; i < RING_GROUPS; ++i) ring.begin(p, i * GROUP, partials.count, slots, i);
    }
    float2 statistics[OWN_ROWS];  // of this lane's partial, the rows from `first_own` on
    const auto load_statistics = [&](int slot) {
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i)
            statistics[i] = __ldcg(static_cast<const float2*>(p.partial_statistics) + slot_row(slot, first_own + i));
    };
    load_statistics(slots);
    float maximum[OWN_ROWS];
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) maximum[i] = -INFINITY;
    Folded folded;
    folded.clear();
    RowSums sums;
    Folding& folding = shared.folding;
#pragma unroll 1
    for (int first = 0; first < partials.count; first += 32) {
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            float highest = fmaxf(maximum[i], statistics[i].x);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(~0u, highest, step);
                if (lane >= step) highest = fmaxf(highest, other);
            }
            float before = __shfl_up_sync(~0u, highest, 1);
            if (lane == 0) before = maximum[i];
            const float anchor = segments::anchor_of(highest, scale);
            folding.factor[lane][first_own + i] =
                make_float2(segments::weight(before, highest, scale, anchor),
                            segments::weight(statistics[i].x, highest, scale, anchor));
            folding.sum[lane][first_own + i] = statistics[i].y;
            maximum[i] = __shfl_sync(~0u, highest, 31);
            if (lane == 0) shared.maximum[first_own + i] = maximum[i];
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // all factors are there
        const int next_slots = slot_of(first + 32 + lane);
        load_statistics(next_slots);
        const int count = min(32, partials.count - first);
#pragma unroll 1
        for (int base = 0; base < count; base += GROUP) {
            const float4* group = ring.take();
            const auto fold = [&](int i) {
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) {
                    const float4 both = *reinterpret_cast<const float4*>(
                        &folding.factor[base + i][first_team_row() + row_of_value(n, 0)]);
                    const segments::Fold by[2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
                    for (int d = 0; d < DIM_BLOCKS; ++d) {
                        float (&out)[4] = folded.out[n][d];
                        const float4 part = group[((i * ROW_TILES + n) * DIM_BLOCKS + d) * CONSUMERS];
                        out[0] = by[0](out[0], part.x), out[1] = by[1](out[1], part.y);
                        out[2] = by[0](out[2], part.z), out[3] = by[1](out[3], part.w);
                    }
                }
            };
            const int of_group = min(GROUP, count - base);
            int i = 0;
#pragma unroll 1
            for (; i + UNROLLED <= of_group; i += UNROLLED)  // without branches, one hides the latency of another
#pragma unroll
                for (int l = 0; l < UNROLLED; ++l) fold(i + l);
#pragma unroll 1
            for (; i < of_group; ++i) fold(i);
            fence_async_proxy();
            named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // all have read the group
            const int ahead = base + RING_GROUPS * GROUP;
            if (threadIdx.x < 32)
                ring.begin(p, first + ahead, partials.count, ahead < 32 ? slots : next_slots, RING_GROUPS - 1);
        }
        if (RowSums::has_row()) {
            const int row = first_team_row() + RowSums::row();
#pragma unroll 8
            for (int i = 0; i < count; ++i) {
                const float2 factor = folding.factor[i][row];
                sums.folded.sum = segments::Fold{factor.x, factor.y}(sums.folded.sum, folding.sum[i][row]);
            }
            sums.folded.maximum = shared.maximum[row];
        }
        slots = next_slots;
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // all have read the factors
    }
    finish(p, work, scale, output_scale, folded, sums.folded, shared);
}

DEVICE void consume(const Params& p, const WorkRange& range, SharedStorage& shared) {
    [[maybe_unused]] const Scale launch_scale(p);
    const float launch_output_scale = p.output_scale * device_scale(p.output_scale_device);
    Exchange& exchange = shared.exchange[threadIdx.x / TEAM];
    const int team_barrier = TEAM_BARRIER + threadIdx.x / TEAM;
    StageState keys, values;
    values.advance();
    for_each_work_tile(p, range, [&](const WorkTile& work) {
        const Request& r = work.request;
#if KV_E4M3
        const Scale scale(p, key_scale(p, work));
        const float output_scale = launch_output_scale * value_scale(p, work);
#else
        const Scale& scale = launch_scale;
        const float output_scale = launch_output_scale;
#endif
        Queries queries;
        queries.load(p, work, shared);
        const int end = end_tile(work);
        const auto token_of = [&](int tile) { return (r.first_tile + tile) * TILE_TOKENS; };
        const bool is_prefix = work.first == 0;
        int slot = first_slot(p, range, range.cta_group) + 1;
        Scores s;
        Output out;
        RowValues maximum, factor;
        Folded folded;
        RowSums sums;
        clear(out);
        folded.clear();
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) maximum[n][0] = maximum[n][1] = -INFINITY;
        const auto score = [&](int tile) {
            mbarrier_wait(shared_address(&shared.full[keys.index]), keys.phase);
            multiply_keys(shared_address(shared.stages[keys.index]), queries, shared, s);
            release(shared, keys);
            keys.advance(2);
            if (scale.flips)
#pragma unroll
                for (int i = 0; i < BLOCKS * ROW_TILES * 4; ++i) {
                    float& cell = s[i / 4 / ROW_TILES][i / 4 % ROW_TILES][i % 4];
                    cell = -cell;
                }
            if (!all_rows_see(p, r, token_of(tile))) mask(work, token_of(tile), shared, s);
            tell_maxima(s, exchange.top[tile % 2][warp_of_team()]);
        };
        // The loop computes the first scores too, since code that runs once costs the time to fetch it.
#pragma unroll 1
        for (int tile = work.first - 1; tile < end; ++tile) {
            const bool has_next = tile + 1 < end;
            if (has_next) score(tile + 1);
            named_barrier_sync<TEAM>(team_barrier);
            if (tile >= work.first) {
                const int turn = tile % 2, token = token_of(tile);
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int d = 0; d < DIM_BLOCKS; ++d)
#pragma unroll
                        for (int i = 0; i < 4; ++i) out[n][d][i] = __fmul_rn(out[n][d][i], factor[n][i % 2]);
                mbarrier_wait(shared_address(&shared.full[values.index]), values.phase);
                const uint32_t stage = shared_address(shared.stages[values.index]);
                if (token >= work.begin && token + TILE_TOKENS <= r.kv_len)
                    multiply_values<false>(stage, 0, 0, exchange.probability[turn], out);
                else
                    multiply_values<true>(stage, work.begin - token, r.kv_len - token, exchange.probability[turn], out);
                release(shared, values);
                values.advance(2);
                if (RowSums::has_row()) sums.add(exchange, turn);
                if (ends_segment(r, tile) || tile + 1 == end) {
                    Statistics statistics;
                    if (RowSums::has_row()) statistics = sums.close(exchange, turn);
                    if (is_prefix) {
                        folded.fold(maximum, out, scale.log2);
                        sums.fold(statistics, scale.log2);
                    } else {
                        write_partial(p, slot++, work, out, statistics);
                    }
                    clear(out);
#pragma unroll
                    for (int n = 0; n < ROW_TILES; ++n) maximum[n][0] = maximum[n][1] = -INFINITY;
                }
            }
            if (has_next) tell_probabilities(s, scale.log2, (tile + 1) % 2, exchange, maximum, factor);
        }
        if (is_prefix) {
            if (work.last == r.kv_tiles) return finish(p, work, scale.log2, output_scale, folded, sums.folded, shared);
            write_partial(p, first_slot(p, range, range.cta_group), work, folded.out, sums.folded);
        }
        // Also: all have read what the warps told each other, and what the rows see.
        if (!arrives_last(p, work, shared)) return;
        const Partials partials(p, range, work);
        const bool stages_are_free = work.space_offset + work.last >= range.group_offset + range.first + range.kv_tiles;
        if (stages_are_free && partials.count > FEW_PARTIALS)
            fold_many(p, partials, work, scale.log2, output_scale, shared);
        else
            fold_few(p, partials, work, scale.log2, output_scale, shared);
    });
}

}  // namespace paged_decode
