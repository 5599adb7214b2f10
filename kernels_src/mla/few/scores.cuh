// The scorers: S^T = K Q^T and softmax, each warp of 16 keys of every tile.
#pragma once
#include "layout.cuh"

namespace paged_mla_decode {

constexpr int STEPS = COLUMNS / 16;   // of a warp product in depth
constexpr bool LOOK_AHEAD = KV_E4M3;  // multiplies the next tile before the last one's maxima are agreed on
constexpr int CHAINS = 2;             // of accumulation for each row eight
constexpr int AHEAD = 2;              // loads of keys under way

using Scores = float[2][4];  // row eights; keys lane / 4 and 8 more, rows 2 (lane % 4) + {0, 1}

// Rows of queries beside an e4m3 cache become fp16 where they lie, a quarter of them by each warp: of 16 columns first
// 4 i + {0, 1}, i to 3, then 4 i + {2, 3}, which is how ldmatrix deals out the bytes of 16 columns of keys. A row of bf16 is
// divided by the power of two that brings its largest magnitude below 2, which its scores are multiplied by. In loops: what
// runs once a piece comes from DRAM, and unrolled it took longer than the first keys.
DEVICE void convert_queries(const Params& p, const Piece& piece, Shared& shared, uint32_t stage, int warp) {
    constexpr int OWN = ROWS / SCORER_WARPS, ROUNDS = (STEPS + 31) / 32;
    const int lane = threadIdx.x % 32;
    const bool e4m3 = p.q_type == TYPE_E4M3;
#pragma unroll 1
    for (int row = warp * OWN; row < (warp + 1) * OWN; ++row) {
        const uint32_t place = stage + row * QUERY_PITCH;
        uint32_t own[ROUNDS][8];
        uint32_t largest = 0;  // magnitudes in both halves: those of bf16 are ordered as integers are
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int step = lane + i * 32;
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (step < STEPS && row < piece.rows) {
                low = load_shared_16_bytes(place + step * (e4m3 ? 16 : 32));
                if (!e4m3) high = load_shared_16_bytes(place + step * 32 + 16);
            }
            own[i][0] = low.x, own[i][1] = low.y, own[i][2] = low.z, own[i][3] = low.w;
            own[i][4] = high.x, own[i][5] = high.y, own[i][6] = high.z, own[i][7] = high.w;
#pragma unroll
            for (int j = 0; j < 8; ++j) largest = __vmaxu2(largest, own[i][j] & 0x7fff7fff);
        }
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        const int exponent = largest > 0 && !e4m3 ? exponent_into_fp16(largest >> 7) : 0;
        const float factor = power_of_two(-exponent);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            uint32_t to[8];
            if (e4m3) {
#pragma unroll
                for (int j = 0; j < 4; ++j) e4m3_to_fp16(own[i][j], to[j], to[4 + j]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 wide = unpack_bf16(own[i][j]);
                    to[j % 2 * 4 + j / 2] = pack_fp16(wide.x * factor, wide.y * factor);
                }
            }
            const int step = lane + i * 32;
            if (step >= STEPS) break;
            store_shared_16_bytes(place + step * 32, make_uint4(to[0], to[1], to[2], to[3]));
            store_shared_16_bytes(place + step * 32 + 16, make_uint4(to[4], to[5], to[6], to[7]));
        }
        if (lane == 0) shared.query_power[row] = power_of_two(exponent);
    }
    named_barrier_sync<SCORER_WARPS * 32>(SCORER_BARRIER);
}

// The piece's queries as the B operand, and the factors of the scores of the thread's rows. Rows that do not exist hold
// anything.
struct Queries {
    uint32_t b[STEPS][2][2];
    float scale[KV_E4M3 ? 2 : 1][KV_E4M3 ? 2 : 1];

    DEVICE float scale_of(int n, int i) const { return scale[KV_E4M3 ? n : 0][KV_E4M3 ? i : 0]; }

    DEVICE void load(const Params& p, const Piece& piece, Shared& shared, uint32_t stage, int warp) {
        const int lane = threadIdx.x % 32;
        const float scale_log2 = softmax_scale_log2(p);
        if constexpr (KV_E4M3) {
            convert_queries(p, piece, shared, stage, warp);
            for (int i = 0; i < 4; ++i)
                scale[i / 2][i % 2] = scale_log2 * shared.query_power[i / 2 * 8 + lane % 4 * 2 + i % 2];
        } else {
            scale[0][0] = scale_log2;
        }
        const uint32_t first = stage + (lane / 16 * 8 + lane % 8) * QUERY_PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint32_t r[4];
            load_matrix_x4(r, first + step * 32);
            b[step][0][0] = r[0], b[step][0][1] = r[1], b[step][1][0] = r[2], b[step][1][1] = r[3];
        }
    }
};

// S^T of the warp's keys, scaled; `keys` is the lane's place in the first 32 bytes.
DEVICE void multiply_keys(uint32_t keys, const Queries& q, Scores& s) {
    constexpr int LOADS = KV_E4M3 ? STEPS / 2 : STEPS;  // of 32 bytes of each key
    float chain[CHAINS][2][4];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c)
#pragma unroll
        for (int i = 0; i < 8; ++i) chain[c][i / 4][i % 4] = 0.f;
    uint32_t raw[AHEAD + 1][4];
#pragma unroll
    for (int load = 0; load < AHEAD; ++load) load_matrix_x4(raw[load], step_place(keys, load));
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        if (load + AHEAD < LOADS) load_matrix_x4(raw[(load + AHEAD) % (AHEAD + 1)], step_place(keys, load + AHEAD));
        const uint32_t(&r)[4] = raw[load % (AHEAD + 1)];
        if constexpr (KV_E4M3) {  // keys 0-7 and 8-15 of 16 columns, then of the next 16
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int step = load * 2 + half;
                uint32_t k[4];
                e4m3_to_fp16(r[half * 2], k[0], k[2]);
                e4m3_to_fp16(r[half * 2 + 1], k[1], k[3]);
#pragma unroll
                for (int n = 0; n < 2; ++n) multiply(chain[step % CHAINS][n], k, q.b[step][n][0], q.b[step][n][1]);
            }
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n) multiply(chain[load % CHAINS][n], r, q.b[load][n][0], q.b[load][n][1]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[n][i] = (chain[0][n][i] + chain[1][n][i]) * q.scale_of(n, i % 2);
        }
}

// -inf where a row does not see the key; bit j of `visible`: the row sees key `prefix` + j; keys before `prefix` all rows see.
DEVICE void hide(const Piece& piece, int tile, const uint32_t (&visible)[ROWS], int warp, Scores& s) {
    const int lane = threadIdx.x % 32;
    const int draft = tile * TILE_TOKENS + warp * 16 + lane / 4 - (piece.length - piece.queries);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = draft + i / 2 * 8;
            const bool seen = own < 0 || (own < 32 && (visible[n * 8 + lane % 4 * 2 + i % 2] >> own & 1));
            if (!seen) s[n][i] = -INFINITY;
        }
}

// The thread's rows: what is subtracted from base-2 exponents, and the sum of this thread's keys.
struct Rows {
    float maximum[2][2];
    float sum[2][2];
};

// Whether the thread's scores are too large for its maxima, said to the other warps.
DEVICE void say_over(const Scores& s, const Rows& rows, int warp, Checked& checked) {
    bool over = false;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) over |= fmaxf(s[n][i], s[n][i + 2]) > rows.maximum[n][i] + MAXIMUM_SLACK;
    const bool any = __any_sync(~0u, over);
    if (threadIdx.x % 32 == 0) {
        checked.over[warp] = any;
        mbarrier_arrive(shared_address(&checked.full));
    }
}

// Brings the maxima on, together with the other warps, for those rows that need it. Consumers get the factors.
DEVICE void raise(const Scores& s, int warp, Shared& shared, Probabilities& p, Rows& rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = fmaxf(s[n][i], s[n][i + 2]);
            for (int other = 4; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
            if (lane < 4) shared.top[warp][n * 8 + lane * 2 + i] = top;
        }
    named_barrier_sync<SCORER_WARPS * 32>(SCORER_BARRIER);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = n * 8 + lane % 4 * 2 + i;
            float top = shared.top[0][row];
            for (int w = 1; w < SCORER_WARPS; ++w) top = fmaxf(top, shared.top[w][row]);
            const float before = rows.maximum[n][i];
            if (top > before + MAXIMUM_SLACK) rows.maximum[n][i] = top;
            const float factor = exp2_approximate(before - rows.maximum[n][i]);
            rows.sum[n][i] *= factor;
            if (warp == 0 && lane < 4) p.factor[row] = factor;
        }
}

// P^T of a tile, for the consumers, once all warps have said whether their scores are over.
DEVICE void give_probabilities(Scores& s, int warp, const Turn<PLACES>& place, Shared& shared, Rows& rows) {
    const int lane = threadIdx.x % 32;
    Probabilities& p = shared.p[place.index];
    wait_barrier(shared.checked[place.index].full, place.parity);
    const uint4 over = *reinterpret_cast<const uint4*>(shared.checked[place.index].over);
    const bool raised = over.x | over.y | over.z | over.w;
    wait_barrier(shared.p_empty[place.index], place.parity ^ 1);
    if (raised) raise(s, warp, shared, p, rows);
    if (warp == 0 && lane == 0) p.raised = raised;
    uint32_t fragment[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = exp2_approximate(s[n][i] - rows.maximum[n][i % 2]);
        for (int i = 0; i < 2; ++i) rows.sum[n][i] += s[n][i] + s[n][i + 2];
        for (int half = 0; half < 2; ++half) fragment[n][half] = transpose_8x8(pack_pair(s[n][half * 2], s[n][half * 2 + 1]));
    }
    p.fragment[warp][lane] = make_uint4(fragment[0][0], fragment[0][1], fragment[1][0], fragment[1][1]);
    release(shared.p_full[place.index]);
}

DEVICE void score(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_SCORER) / 32, 0);
    const uint32_t keys = place_in_stage(lane / 16 * 16, warp * 16 + lane % 16);
    Turn<STAGES> turn;
    Turn<PLACES> place;
    uint32_t sums_parity = 0;
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        if (lane < ROWS) shared.visible[warp][lane] = visible_drafts(p, piece, lane);
        Queries q;
        wait_barrier(shared.full[turn.index], turn.parity);
        q.load(p, piece, shared, shared_address(shared.ring[turn.index]), warp);
        fence_async_proxy();  // else the arrival may overtake loads of fragments, and a copy write here before they read
        __syncwarp();
        if (lane < CONSUMER_WARPS / SCORER_WARPS) mbarrier_arrive(shared_address(&shared.empty[turn.index]));
        turn.advance();
        Rows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
        const int last = piece.first + piece.steps();
        Scores s;
        const auto multiply_tile = [&](int tile) {
            wait_barrier(shared.full[turn.index], turn.parity);
            multiply_keys(shared_address(shared.ring[turn.index]) + keys, q, s);
            turn.advance();
        };
        if (piece.first < last) multiply_tile(piece.first);
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            if ((tile + 1) * TILE_TOKENS > piece.length - piece.queries) hide(piece, tile, shared.visible[warp], warp, s);
            say_over(s, rows, warp, shared.checked[place.index]);
            Scores own;
#pragma unroll
            for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = s[i / 4][i % 4];
            // Where scoring takes longest, the next tile is multiplied before the other warps have to have spoken.
            if (LOOK_AHEAD && tile + 1 < last) multiply_tile(tile + 1);
            give_probabilities(own, warp, place, shared, rows);
            if (!LOOK_AHEAD && tile + 1 < last) multiply_tile(tile + 1);
            place.advance();
        }
        wait_barrier(shared.sums_empty, sums_parity ^ 1);
        sums_parity ^= 1;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                for (int other = 4; other < 32; other *= 2)
                    rows.sum[n][i] += __shfl_xor_sync(~0u, rows.sum[n][i], other);
                const int row = n * 8 + lane * 2 + i;
                if (lane < 4) shared.sum[warp][row] = rows.sum[n][i];
                if (lane < 4 && warp == 0) shared.maximum[row] = rows.maximum[n][i];
            }
        release(shared.sums_full);
    }
}

}  // namespace paged_mla_decode
