// Paged attention, one query token a request (decode), grouped queries, bf16, head_dim 128.
//
//   page table --> producer warp --TMA or cp.async--> ring of 16 KB buffers  K V K V ...   (full / empty mbarriers)
//                                                        |
//   4 consumer warps, each 16 of a tile's 64 tokens:     v
//       S^T = K Q^T   (tokens x rows)   -> online softmax over tokens -> P^T (bf16)
//       O^T += V^T P^T (head_dim x rows), fp32 in registers
//                                                        |
//   the warps' (maximum, sum, O) meet in shared memory --+--> output, or a partial in the workspace,
//                                                             merged by the CTA that arrives last
//
// Rows are the query heads that share one KV head, padded to ROWS. They sit on the 8-wide side of the MMA, so that
// a group of 8 wastes nothing.
//
// The grid is persistent and comes from bounds alone. CTAs work in teams of `heads_together`, each member on its own KV
// head of a block of as many, so that neighbours read the heads of a token at about the same time (faster by measurement:
// benchmarks/results/grid_choice.json). All tiles of all (request, head block) pairs form one line; team c of n takes the
// tiles [c T / n, (c + 1) T / n). A pair that one team holds whole is finished there; of any other, each CTA writes a
// partial. Split boundaries are a pure function of the lengths and the grid.
//
// Build: -DROWS=8|16 -DUSE_TMA=0|1 -DSTAGES=n -DCTAS_PER_SM=n -DSHARED_BYTES=n -DKERNEL_NAME=symbol

#include <cuda_bf16.h>

#include "../common/ptx.cuh"
#if USE_TMA
#include "PagedDecodeTmaParams.h"
using Params = PagedDecodeTmaParams;
#else
#include "PagedDecodeCopyParams.h"
using Params = PagedDecodeCopyParams;
#endif

namespace paged_decode {

constexpr int HEAD_DIM = 128;
constexpr int TILE_TOKENS = 64;
static_assert(STAGES >= 2, "K and V of one tile are read while the next arrive");
constexpr int BUFFERS = 2 * STAGES;  // K of a tile, then its V
constexpr int CONSUMER_WARPS = 4;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int PRODUCER_WARP = CONSUMER_WARPS;
constexpr int THREADS = CONSUMERS + 32;

constexpr int WARP_TOKENS = TILE_TOKENS / CONSUMER_WARPS;
constexpr int ROW_TILES = ROWS / 8;
constexpr int DEPTH_STEPS = HEAD_DIM / 16;
constexpr int HALF_BYTES = TILE_TOKENS * 128;  // a swizzled buffer is two halves of 64 head dims, 128 bytes a token
constexpr int BUFFER_BYTES = 2 * HALF_BYTES;
// 4 floats more than a row keep the fragments' writes free of bank conflicts. With few rows each warp has a buffer of its
// own; with many, that would cost the second CTA on the SM.
constexpr int MERGE_STRIDE = HEAD_DIM + 4;
constexpr int MERGE_BUFFERS = ROWS == 8 ? CONSUMER_WARPS : 1;
constexpr int ROWS_PER_WARP = ROWS / CONSUMER_WARPS;  // of the merged result
constexpr int MERGE_BATCH = ROWS == 8 ? 8 : 3;         // partials whose loads are in flight together, without spills
constexpr int WEIGHTS = MERGE_BUFFERS * MERGE_STRIDE;  // partials whose weights fit the merge buffers at once
constexpr int LANES_PER_ROW = CONSUMERS / ROWS;        // when statistics are merged

constexpr uint32_t STATUS_LENGTH_OVER_BOUND = 1;
constexpr uint32_t STATUS_LENGTH_NEGATIVE = 2;
constexpr uint32_t STATUS_PAGE_OUTSIDE_POOL = 4;

constexpr int CONSUMER_BARRIER = 1;

struct Shared {
    alignas(1024) char ring[BUFFERS][BUFFER_BYTES];
    union {
        float merge[MERGE_BUFFERS][ROWS][MERGE_STRIDE];
        float weight[ROWS][WEIGHTS];
    };
    float warp_maximum[CONSUMER_WARPS][ROWS];
    float warp_sum[CONSUMER_WARPS][ROWS];
    float maximum[ROWS];
    float sum[ROWS];
    alignas(8) uint64_t full[BUFFERS];
    alignas(8) uint64_t empty[BUFFERS];
    int arrived_last;
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the variant list states another size of dynamic shared memory");
static_assert(WARP_TOKENS == 16, "a consumer warp takes one 16-token MMA tile");

// Position in the ring; the phase flips each time around.
struct RingCursor {
    int index = 0;
    uint32_t phase = 0;
    DEVICE void advance() {
        if (++index == BUFFERS) {
            index = 0;
            phase ^= 1;
        }
    }
};

// A piece of one (request, head block) pair, and the KV head of it that is this CTA's: tiles [first, last) of `tiles`.
struct Piece {
    int request, head, length;
    int first, last, tiles;
    int line_start;  // index of the pair's tile 0 on the line of all tiles
};

DEVICE int stated_length(const Params& p, int request) { return static_cast<const int*>(p.seq_lens)[request]; }

DEVICE int clamped_length(const Params& p, int request) {
    return min(max(stated_length(p, request), 0), p.max_seq_len);
}

// A request without keys still owns one (empty) tile a head, whose CTA writes its output.
DEVICE int tile_count(int length) { return max(1, (length + TILE_TOKENS - 1) / TILE_TOKENS); }

// The team's share of the line, found by each warp on its own from the lengths.
struct Share {
    int team, member;         // the CTA is one of `heads_together` in its team
    int blocks;               // head blocks of a request
    int begin, end;           // tiles on the line
    int request, line_start;  // where `begin` lies: request, and the index of its first tile
    int total, teams;         // tiles in all, teams that have any
};

DEVICE Share find_share(const Params& p) {
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int b = lane; b < p.batch; b += 32) total += tile_count(clamped_length(p, b));
    Share share;
    share.team = blockIdx.x / p.heads_together;
    share.member = blockIdx.x % p.heads_together;
    share.blocks = p.kv_heads / p.heads_together;
    share.total = total = __reduce_add_sync(~0u, total) * share.blocks;
    share.teams = min(static_cast<int>(gridDim.x / p.heads_together), total);
    if (share.team >= share.teams) {
        share.begin = share.end = share.request = share.line_start = 0;
        return share;
    }
    share.begin = static_cast<int>(static_cast<int64_t>(share.team) * total / share.teams);
    share.end = static_cast<int>(static_cast<int64_t>(share.team + 1) * total / share.teams);
    int before = 0;
    for (int base = 0;; base += 32) {
        const int b = base + lane;
        const int own = b < p.batch ? tile_count(clamped_length(p, b)) * share.blocks : 0;
        int through = own;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const uint32_t past = __ballot_sync(~0u, before + through > share.begin);
        if (past) {
            const int winner = __ffs(past) - 1;
            share.request = base + winner;
            share.line_start = before + __shfl_sync(~0u, through - own, winner);
            return share;
        }
        before += __shfl_sync(~0u, through, 31);
    }
}

// Calls visit(piece) for each piece of the share, in order; producer and consumers walk the same way.
template <class Visit>
DEVICE void for_each_piece(const Params& p, const Share& share, Visit visit) {
    int position = share.begin, request = share.request, request_start = share.line_start;
    while (position < share.end) {
        Piece piece;
        piece.request = request;
        piece.length = clamped_length(p, request);
        piece.tiles = tile_count(piece.length);
        const int block = (position - request_start) / piece.tiles;
        piece.head = block * p.heads_together + share.member;
        piece.line_start = request_start + block * piece.tiles;
        piece.first = position - piece.line_start;
        piece.last = min(piece.tiles, piece.first + share.end - position);
        visit(piece);
        position += piece.last - piece.first;
        if (position - request_start == piece.tiles * share.blocks) {
            request_start = position;
            ++request;
        }
    }
}

// ---------------------------------------------------------------- producer

// Page ids of one request, 32 at a time in the lanes of the producer warp.
struct PageWindow {
    int base = -1;  // first table column held
    int page = 0;
    DEVICE int get(const Params& p, int request, int column, int columns) {
        if (base < 0 || column >= base + 32) {
            base = column;
            const int own = column + threadIdx.x % 32;
            page = own < columns ? static_cast<const int*>(p.page_table)[request * p.table_stride + own] : 0;
            if (page < 0 || page >= p.num_pages) {
                page = min(max(page, 0), p.num_pages - 1);
                atomicOr(static_cast<uint32_t*>(p.status), STATUS_PAGE_OUTSIDE_POOL);
            }
        }
        return __shfl_sync(~0u, page, column - base);
    }
};

DEVICE void produce(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int page_tokens = 1 << p.page_size_log2;
    const int chunk = min(page_tokens, TILE_TOKENS);  // tokens of a tile that one page holds together
    RingCursor cursor;
    uint32_t emptied = 1;  // a fresh barrier counts as emptied once
#if USE_TMA
    const uint64_t policy = evict_first_policy();
#endif
    for_each_piece(p, share, [&](const Piece& piece) {
        PageWindow pages;
        const int columns = (piece.length + page_tokens - 1) >> p.page_size_log2;
        for (int tile = piece.first; tile < piece.last; ++tile) {
            const int token = tile * TILE_TOKENS;
            const int valid = min(piece.length - token, TILE_TOKENS);
            if (valid <= 0) continue;
            // Lane i of the first chunks holds the page of chunk i.
            int page = 0;
            const int chunks = (valid + chunk - 1) / chunk;
            for (int i = 0; i < chunks; ++i) {
                const int found = pages.get(p, piece.request, (token + i * chunk) >> p.page_size_log2, columns);
                if (lane == i) page = found;
            }
            for (int kv = 0; kv < 2; ++kv) {
                const uint32_t buffer = shared_address(shared.ring[cursor.index]);
                const uint32_t full = shared_address(&shared.full[cursor.index]);
                mbarrier_wait(shared_address(&shared.empty[cursor.index]), cursor.phase ^ emptied);
#if USE_TMA
                if (lane == 0) mbarrier_arrive_expect_bytes(full, chunks * chunk * HEAD_DIM * 2);
                __syncwarp();
                if (lane < chunks) {
                    const void* map = kv == 0 ? &p.k_map : &p.v_map;
                    const int row = (token + lane * chunk) & (page_tokens - 1);
                    for (int half = 0; half < 2; ++half)
                        copy_tensor_box_4d(buffer + half * HALF_BYTES + lane * chunk * 128, map, full, half * 64, row,
                                           piece.head, page, policy);
                }
#else
                const __nv_bfloat16* base = static_cast<const __nv_bfloat16*>(kv == 0 ? p.k : p.v);
                const int64_t page_stride = kv == 0 ? p.k_page_stride : p.v_page_stride;
                const int64_t token_stride = kv == 0 ? p.k_token_stride : p.v_token_stride;
                base += piece.head * (kv == 0 ? p.k_head_stride : p.v_head_stride);
                const int column = lane % 16;  // 16 bytes of a token
                for (int rows = 0; rows < valid; rows += 2) {
                    const int row = rows + lane / 16;
                    const int row_page = __shfl_sync(~0u, page, row / chunk);
                    if (row >= valid) continue;
                    const int in_page = (token + row) & (page_tokens - 1);
                    const uint32_t target =
                        buffer + column / 8 * HALF_BYTES + row * 128 + (((column % 8) ^ (row % 8)) * 16);
                    copy_16_bytes(target, base + row_page * page_stride + in_page * token_stride + column * 8);
                }
                mbarrier_arrive_after_copies(full);
#endif
                cursor.advance();
            }
        }
    });
}

// ---------------------------------------------------------------- consumers

// What one warp knows of one pair: for each of the thread's two rows a row tile, the maximum (base-2 exponents), the
// sum of this thread's tokens, and O^T (dims lane / 4 + 8 i of 16-dim steps, rows 2 (lane % 4) + {0, 1}).
struct Accumulator {
    float maximum[ROW_TILES][2];
    float sum[ROW_TILES][2];
    float out[ROW_TILES][DEPTH_STEPS][4];
    DEVICE void clear() {
        for (int n = 0; n < ROW_TILES; ++n) {
            for (int i = 0; i < 2; ++i) maximum[n][i] = -INFINITY, sum[n][i] = 0.f;
            for (int d = 0; d < DEPTH_STEPS; ++d)
                for (int i = 0; i < 4; ++i) out[n][d][i] = 0.f;
        }
    }
};

using QueryFragments = uint32_t[ROW_TILES][DEPTH_STEPS][2];

DEVICE void load_query(const Params& p, const Piece& piece, QueryFragments& q) {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < ROW_TILES; ++n) {
        const int row = n * 8 + lane / 4;
        const __nv_bfloat16* head = static_cast<const __nv_bfloat16*>(p.q) + piece.request * p.q_token_stride +
                                    (piece.head * p.group + row) * p.q_head_stride + lane % 4 * 2;
        for (int step = 0; step < DEPTH_STEPS; ++step)
            for (int i = 0; i < 2; ++i)
                q[n][step][i] = row < p.group ? *reinterpret_cast<const uint32_t*>(head + step * 16 + i * 8) : 0u;
    }
}

// S^T of the warp's 16 tokens.
DEVICE void multiply_keys(uint32_t buffer, const QueryFragments& q, float (&s)[ROW_TILES][4]) {
    const int lane = threadIdx.x % 32;
    const int token = threadIdx.x / 32 * WARP_TOKENS + lane % 16;
    // Two chains of accumulation hide the latency of the MMA.
    float odd[ROW_TILES][4];
    for (int n = 0; n < ROW_TILES; ++n)
        for (int i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0.f;
#pragma unroll
    for (int step = 0; step < DEPTH_STEPS; ++step) {
        const int column = step * 2 + lane / 16;
        uint32_t k[4];
        load_matrix_x4(k, buffer + column / 8 * HALF_BYTES + token * 128 + ((column % 8) ^ (token % 8)) * 16);
        for (int n = 0; n < ROW_TILES; ++n) mma_bf16_16x8x16(step % 2 ? odd[n] : s[n], k, q[n][step][0], q[n][step][1]);
    }
    for (int n = 0; n < ROW_TILES; ++n)
        for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
}

// Turns S^T into P^T as the B operand of the second product, and brings the accumulator to the new maximum.
DEVICE void softmax(const Params& p, float (&s)[ROW_TILES][4], int valid, Accumulator& acc, uint32_t (&probability)[ROW_TILES][2]) {
    const int lane = threadIdx.x % 32;
    const int token = threadIdx.x / 32 * WARP_TOKENS + lane / 4;
    for (int n = 0; n < ROW_TILES; ++n) {
        for (int i = 0; i < 4; ++i) {
            const bool visible = token + (i / 2) * 8 < valid;
            s[n][i] = visible ? s[n][i] * p.softmax_scale_log2 : -INFINITY;
        }
        float rescale[2];
        for (int i = 0; i < 2; ++i) {
            float top = fmaxf(s[n][i], s[n][i + 2]);
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            top = fmaxf(top, acc.maximum[n][i]);
            rescale[i] = exp2_approximate(acc.maximum[n][i] - top);
            acc.maximum[n][i] = top;
            s[n][i] = exp2_approximate(s[n][i] - top);
            s[n][i + 2] = exp2_approximate(s[n][i + 2] - top);
            acc.sum[n][i] = acc.sum[n][i] * rescale[i] + s[n][i] + s[n][i + 2];
        }
        if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f))
            for (int d = 0; d < DEPTH_STEPS; ++d)
                for (int i = 0; i < 4; ++i) acc.out[n][d][i] *= rescale[i % 2];
        probability[n][0] = transpose_8x8(pack_bf16(s[n][0], s[n][1]));
        probability[n][1] = transpose_8x8(pack_bf16(s[n][2], s[n][3]));
    }
}

// O^T += V^T P^T. Rows past the length may hold NaN, and 0 x NaN is NaN: their bits are masked to zero.
DEVICE void multiply_values(uint32_t buffer, int valid, const uint32_t (&probability)[ROW_TILES][2], Accumulator& acc) {
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 * WARP_TOKENS;
    const int token = first + lane / 16 * 8 + lane % 8;
    uint32_t keep[2];
    for (int i = 0; i < 2; ++i) {
        const int pair = first + i * 8 + lane % 4 * 2;
        keep[i] = (pair < valid ? 0x0000ffffu : 0u) | (pair + 1 < valid ? 0xffff0000u : 0u);
    }
#pragma unroll
    for (int d = 0; d < DEPTH_STEPS; ++d) {
        const int column = d * 2 + lane / 8 % 2;
        uint32_t v[4];
        load_matrix_x4_transposed(v, buffer + column / 8 * HALF_BYTES + token * 128 + ((column % 8) ^ (token % 8)) * 16);
        if (valid < TILE_TOKENS)
            for (int i = 0; i < 4; ++i) v[i] &= keep[i / 2];
        for (int n = 0; n < ROW_TILES; ++n) mma_bf16_16x8x16(acc.out[n][d], v, probability[n][0], probability[n][1]);
    }
}

// The four warps' accumulators become shared.merge (unnormalised O, to be added over its buffers), maximum and sum.
DEVICE void merge_warps(Accumulator& acc, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    for (int n = 0; n < ROW_TILES; ++n)
        for (int i = 0; i < 2; ++i) {
            for (int step = 4; step < 32; step *= 2) acc.sum[n][i] += __shfl_xor_sync(~0u, acc.sum[n][i], step);
            const int row = n * 8 + lane % 4 * 2 + i;
            if (lane < 4) {
                shared.warp_maximum[warp][row] = acc.maximum[n][i];
                shared.warp_sum[warp][row] = acc.sum[n][i];
            }
        }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    for (int n = 0; n < ROW_TILES; ++n)
        for (int i = 0; i < 2; ++i) {
            const int row = n * 8 + lane % 4 * 2 + i;
            float highest = shared.warp_maximum[0][row];
            for (int w = 1; w < CONSUMER_WARPS; ++w) highest = fmaxf(highest, shared.warp_maximum[w][row]);
            const float anchor = highest == -INFINITY ? 0.f : highest;  // no visible key: every weight is 0, not NaN
            const float weight = exp2_approximate(acc.maximum[n][i] - anchor);
            for (int d = 0; d < DEPTH_STEPS; ++d) acc.out[n][d][i] *= weight, acc.out[n][d][i + 2] *= weight;
            if (threadIdx.x < 4) {
                float total = 0.f;
                for (int w = 0; w < CONSUMER_WARPS; ++w)
                    total += shared.warp_sum[w][row] * exp2_approximate(shared.warp_maximum[w][row] - anchor);
                shared.maximum[row] = highest;
                shared.sum[row] = total;
            }
        }
    // Warps that share a buffer take turns, so that the order of the additions is fixed.
    for (int turn = 0; turn < CONSUMER_WARPS / MERGE_BUFFERS; ++turn) {
        if (turn == warp / MERGE_BUFFERS)
            for (int n = 0; n < ROW_TILES; ++n)
                for (int d = 0; d < DEPTH_STEPS; ++d)
                    for (int i = 0; i < 4; ++i) {
                        const int row = n * 8 + lane % 4 * 2 + i % 2, dim = d * 16 + lane / 4 + i / 2 * 8;
                        float& cell = shared.merge[warp % MERGE_BUFFERS][row][dim];
                        cell = turn == 0 ? acc.out[n][d][i] : cell + acc.out[n][d][i];
                    }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    }
}

DEVICE float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Four head dims of a row of what merge_warps left.
DEVICE float4 merged(const Shared& shared, int row) {
    const int dim = threadIdx.x % 32 * 4;
    float4 value = *reinterpret_cast<const float4*>(&shared.merge[0][row][dim]);
    for (int b = 1; b < MERGE_BUFFERS; ++b) value = value + *reinterpret_cast<const float4*>(&shared.merge[b][row][dim]);
    return value;
}

// A warp writes a row, four head dims a lane. A row without visible keys is 0 with LSE -inf.
DEVICE void write_row(const Params& p, int request, int head, float4 value, float top, float total) {
    const int lane = threadIdx.x % 32;
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + request * p.out_token_stride + head * p.out_head_stride;
    const float scale = total == 0.f ? 0.f : 1.f / total;
    *reinterpret_cast<uint2*>(out + lane * 4) =
        make_uint2(pack_bf16(value.x * scale, value.y * scale), pack_bf16(value.z * scale, value.w * scale));
    if (lane == 0 && p.lse != nullptr)
        static_cast<float*>(p.lse)[request * p.lse_token_stride + head * p.lse_head_stride] = top + log2f(total);
}

DEVICE int64_t slot_row(int slot, int row) { return static_cast<int64_t>(slot) * ROWS + row; }

DEVICE int cta_of(const Params& p, int team) { return team * p.heads_together + blockIdx.x % p.heads_together; }

// The slot of a team's part of a pair that team `first` begins: a CTA has at most one part that begins in it and goes
// on elsewhere (odd slot) and one that comes from elsewhere (even slot).
DEVICE int slot_of(const Params& p, int team, int first) { return 2 * cta_of(p, team) + (team == first); }

// (top, total) stands for total * 2^top; adds another such number.
DEVICE void add_statistics(float& top, float& total, float other_top, float other_total) {
    const float highest = fmaxf(top, other_top);
    const float anchor = highest == -INFINITY ? 0.f : highest;  // nothing visible so far: 0, not NaN
    total = total * exp2_approximate(top - anchor) + other_total * exp2_approximate(other_top - anchor);
    top = highest;
}

// The partial outputs of MERGE_BATCH parts from `begin` on, for the rows of this warp; past `parts` the last again.
DEVICE void load_parts(const Params& p, int first, int begin, int parts, float4 (&loaded)[MERGE_BATCH][ROWS_PER_WARP]) {
    const float4* partial = static_cast<const float4*>(p.partial_out) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MERGE_BATCH; ++i) {
        const int slot = slot_of(p, first + min(begin + i, parts - 1), first);
#pragma unroll
        for (int j = 0; j < ROWS_PER_WARP; ++j) {
            const int row = threadIdx.x / 32 + j * CONSUMER_WARPS;
            loaded[i][j] = row < p.group ? __ldcg(&partial[slot_row(slot, row) * (HEAD_DIM / 4)]) : make_float4(0, 0, 0, 0);
        }
    }
}

// All parts of a pair, from team `first` to team `last`, added in team order.
DEVICE void merge_parts(const Params& p, const Piece& piece, int first, int last, Shared& shared) {
    const int parts = last - first + 1;
    float4 loaded[MERGE_BATCH][ROWS_PER_WARP];
    load_parts(p, first, 0, parts, loaded);  // under way while the weights are found

    const float2* statistics = static_cast<const float2*>(p.partial_statistics);
    const int own_row = threadIdx.x / LANES_PER_ROW, own_lane = threadIdx.x % LANES_PER_ROW;
    float top = -INFINITY, total = 0.f;
    if (own_row < p.group)
        for (int i = own_lane; i < parts; i += LANES_PER_ROW) {
            const float2 part = __ldcg(&statistics[slot_row(slot_of(p, first + i, first), own_row)]);
            if (i < WEIGHTS) shared.weight[own_row][i] = part.x;
            add_statistics(top, total, part.x, part.y);
        }
    for (int step = 1; step < LANES_PER_ROW; step *= 2) {
        const float other_top = __shfl_xor_sync(~0u, top, step);
        const float other_total = __shfl_xor_sync(~0u, total, step);
        add_statistics(top, total, other_top, other_total);
    }
    if (own_lane == 0) shared.maximum[own_row] = top, shared.sum[own_row] = total;
    const float anchor = top == -INFINITY ? 0.f : top;

    float4 value[ROWS_PER_WARP];
    for (int j = 0; j < ROWS_PER_WARP; ++j) value[j] = make_float4(0, 0, 0, 0);
    for (int base = 0; base < parts; base += WEIGHTS) {
        const int count = min(parts - base, WEIGHTS);
        if (own_row < p.group)
            for (int i = own_lane; i < count; i += LANES_PER_ROW) {
                const int slot = slot_of(p, first + base + i, first);
                const float maximum = base == 0 ? shared.weight[own_row][i] : __ldcg(&statistics[slot_row(slot, own_row)]).x;
                shared.weight[own_row][i] = exp2_approximate(maximum - anchor);
            }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        for (int part = 0; part < count; part += MERGE_BATCH) {
            if (base + part > 0) load_parts(p, first, base + part, parts, loaded);
#pragma unroll
            for (int i = 0; i < MERGE_BATCH; ++i)
#pragma unroll
                for (int j = 0; j < ROWS_PER_WARP; ++j) {
                    const int row = threadIdx.x / 32 + j * CONSUMER_WARPS;
                    const float weight = part + i < count ? shared.weight[row][part + i] : 0.f;
                    value[j].x += weight * loaded[i][j].x;
                    value[j].y += weight * loaded[i][j].y;
                    value[j].z += weight * loaded[i][j].z;
                    value[j].w += weight * loaded[i][j].w;
                }
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // the weights are free again
    }
    for (int j = 0; j < ROWS_PER_WARP; ++j) {
        const int row = threadIdx.x / 32 + j * CONSUMER_WARPS;
        if (row < p.group)
            write_row(p, piece.request, piece.head * p.group + row, value[j], shared.maximum[row], shared.sum[row]);
    }
}

DEVICE void finish_piece(const Params& p, const Share& share, const Piece& piece, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const bool whole = piece.first == 0 && piece.last == piece.tiles;
    // Team c begins at floor(c T / n), so the tile x lies in team floor(((x + 1) n - 1) / T).
    const int64_t n = share.teams;
    const int first = whole ? 0 : static_cast<int>(((piece.line_start + 1) * n - 1) / share.total);
    const int slot = slot_of(p, share.team, first);
    for (int row = threadIdx.x / 32; row < p.group; row += CONSUMER_WARPS) {
        const float4 value = merged(shared, row);
        if (whole)
            write_row(p, piece.request, piece.head * p.group + row, value, shared.maximum[row], shared.sum[row]);
        else
            static_cast<float4*>(p.partial_out)[slot_row(slot, row) * (HEAD_DIM / 4) + lane] = value;
    }
    if (whole) return;
    if (threadIdx.x < p.group)
        static_cast<float2*>(p.partial_statistics)[slot_row(slot, threadIdx.x)] =
            make_float2(shared.maximum[threadIdx.x], shared.sum[threadIdx.x]);
    const int last = static_cast<int>(((static_cast<int64_t>(piece.line_start) + piece.tiles) * n - 1) / share.total);
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    if (threadIdx.x == 0) {
        // Release: what the barrier ordered before is seen by whoever acquires; acquire: it sees the others' parts.
        uint32_t* counter = static_cast<uint32_t*>(p.counters) + cta_of(p, first);
        const bool is_last = add_acquire_release(counter, 1) == static_cast<uint32_t>(last - first);
        if (is_last) *counter = 0;  // ready for the next launch
        shared.arrived_last = is_last;
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    if (shared.arrived_last) merge_parts(p, piece, first, last, shared);
}

DEVICE void consume(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int first_token = threadIdx.x / 32 * WARP_TOKENS;
    RingCursor cursor;
    for_each_piece(p, share, [&](const Piece& piece) {
        QueryFragments q;
        load_query(p, piece, q);
        Accumulator acc;
        acc.clear();
        for (int tile = piece.first; tile < piece.last; ++tile) {
            const int valid = min(piece.length - tile * TILE_TOKENS, TILE_TOKENS);
            if (valid <= 0) continue;
            const bool any = first_token < valid;
            uint32_t probability[ROW_TILES][2];
            mbarrier_wait(shared_address(&shared.full[cursor.index]), cursor.phase);
            if (any) {
                float s[ROW_TILES][4];
                multiply_keys(shared_address(shared.ring[cursor.index]), q, s);
                softmax(p, s, valid, acc, probability);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[cursor.index]));
            cursor.advance();
            mbarrier_wait(shared_address(&shared.full[cursor.index]), cursor.phase);
            if (any) multiply_values(shared_address(shared.ring[cursor.index]), valid, probability, acc);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[cursor.index]));
            cursor.advance();
        }
        merge_warps(acc, shared);
        finish_piece(p, share, piece, shared);
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // shared.merge and its statistics are free again
    });
}

DEVICE void report_lengths(const Params& p) {
    uint32_t seen = 0;
    for (int b = threadIdx.x; b < p.batch; b += THREADS) {
        const int length = stated_length(p, b);
        if (length > p.max_seq_len) seen |= STATUS_LENGTH_OVER_BOUND;
        if (length < 0) seen |= STATUS_LENGTH_NEGATIVE;
    }
    if (seen) atomicOr(static_cast<uint32_t*>(p.status), seen);
}

}  // namespace paged_decode

extern "C" __global__ void __launch_bounds__(paged_decode::THREADS, CTAS_PER_SM)
    KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace paged_decode;
    extern __shared__ __align__(1024) char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    if (threadIdx.x < BUFFERS) {
        // TMA: one arrival that announces bytes. cp.async: one arrival a producer lane.
        mbarrier_init(shared_address(&shared.full[threadIdx.x]), USE_TMA ? 1 : 32);
        mbarrier_init(shared_address(&shared.empty[threadIdx.x]), CONSUMER_WARPS);
#if USE_TMA
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (threadIdx.x == 0) prefetch_tensor_map(&p.k_map);
        if (threadIdx.x == 1) prefetch_tensor_map(&p.v_map);
#endif
    }
    __syncthreads();
    wait_for_previous_grid();
    const Share share = find_share(p);
    if (threadIdx.x / 32 == PRODUCER_WARP) {
        produce(p, share, shared);
        allow_next_grid();
    } else {
        consume(p, share, shared);
    }
    if (blockIdx.x == 0) report_lengths(p);
}
