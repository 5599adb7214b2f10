// QK warps of the kernel for few rows: S^T = K Q^T and softmax, 16 keys of every tile per warp.
#pragma once
#include "shared_storage.cuh"

namespace paged_mla_decode {

constexpr int STEPS = COLUMNS / 16;  // of a product
constexpr int WARP_STEPS = STEPS / COLUMN_SHARES;
constexpr bool LOOK_AHEAD = KV_E4M3;  // multiplies the next tile before the warps agree on this tile's maxima
constexpr int CHAINS = COLUMN_SHARES == 1 ? 2 : 1;  // of accumulation for each group of 8 rows
constexpr int AHEAD = 2;  // loads of keys in flight

// Of a QK warp: which 16 keys of a tile it has, its share of the columns, and the first of its rows.
DEVICE int key_warp(int warp) { return COLUMN_SHARES == 1 ? warp : warp % KEY_WARPS; }
DEVICE int column_share(int warp) { return COLUMN_SHARES == 1 ? 0 : warp / KEY_WARPS; }
DEVICE int first_row(int warp) { return column_share(warp) * 8; }

// The 16 columns that a share multiplies in a step, as bytes in a row of queries: every second 16, since the sum of
// these is what a chain of the other kernels adds up.
DEVICE int query_byte(int step, int share) { return (step * COLUMN_SHARES + share) * 32; }

using Scores = float[ROW_EIGHTS][4];  // for each 8 rows: keys lane / 4 and + 8, rows 2 (lane % 4) + {0, 1}

// Converts queries to fp16 in place for an e4m3 cache, a quarter of the rows per warp, in the order of the bytes of
// keys (bf16_to_fp16_as_e4m3). A bf16 row is divided by the power of two that brings its largest magnitude below 2; its
// scores are multiplied with it. In loops: code that runs once per work tile is fetched from DRAM, and unrolled it took
// longer than the first keys.
DEVICE void convert_queries(const Params& p, const WorkTile& work, SharedStorage& shared, uint32_t stage, int warp) {
    constexpr int OWN = ROWS / QK_WARPS, ROUNDS = (STEPS + 31) / 32;
    const int lane = threadIdx.x % 32;
    const bool e4m3 = query_type(p) == TYPE_E4M3;
#pragma unroll 1
    for (int row = warp * OWN; row < (warp + 1) * OWN; ++row) {
        const uint32_t address = stage + row * QUERY_PITCH;
        uint32_t own[ROUNDS][8];
        uint32_t largest = 0;  // magnitudes in both halves; those of bf16 are ordered like integers
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int step = lane + i * 32;
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (step < STEPS && row < work.rows) {
                low = load_shared_uint4(address + step * (e4m3 ? 16 : 32));
                if (!e4m3) high = load_shared_uint4(address + step * 32 + 16);
            }
            own[i][0] = low.x, own[i][1] = low.y, own[i][2] = low.z, own[i][3] = low.w;
            own[i][4] = high.x, own[i][5] = high.y, own[i][6] = high.z, own[i][7] = high.w;
#pragma unroll
            for (int j = 0; j < 8; ++j) largest = __vmaxu2(largest, own[i][j] & 0x7fff7fff);
        }
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        const int exponent = largest > 0 && !e4m3 ? fp16_range_exponent(largest >> 7) : 0;
        const float factor = power_of_two(-exponent);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            uint32_t to[8];
            if (e4m3) {
#pragma unroll
                for (int j = 0; j < 4; ++j) e4m3_to_fp16(own[i][j], to[j], to[4 + j]);
            } else {
                bf16_to_fp16_as_e4m3(own[i], factor, to);
            }
            const int step = lane + i * 32;
            if (step >= STEPS) break;
            store_shared_uint4(address + step * 32, make_uint4(to[0], to[1], to[2], to[3]));
            store_shared_uint4(address + step * 32 + 16, make_uint4(to[4], to[5], to[6], to[7]));
        }
        if (lane == 0) shared.query_scale[row] = power_of_two(exponent);
    }
    named_barrier_sync<QK_WARPS * 32>(QK_BARRIER);
}

// A work tile's queries as the B operand, and the factors of the scores of the thread's rows. Rows that do not exist
// hold arbitrary values.
struct Queries {
    uint32_t b[WARP_STEPS][2][2];
    float scale[KV_E4M3 ? 2 : 1][KV_E4M3 ? 2 : 1];

    DEVICE float scale_of(int n, int i) const { return scale[KV_E4M3 ? n : 0][KV_E4M3 ? i : 0]; }

    DEVICE void load(const Params& p, const WorkTile& work, SharedStorage& shared, uint32_t stage, int warp) {
        const int lane = threadIdx.x % 32;
        const float scale_log2 = softmax_scale_log2(p);
        if constexpr (KV_E4M3) {
            convert_queries(p, work, shared, stage, warp);
            for (int i = 0; i < 4; ++i)
                scale[i / 2][i % 2] = scale_log2 * shared.query_scale[i / 2 * 8 + lane % 4 * 2 + i % 2];
        } else {
            scale[0][0] = scale_log2;
        }
        const uint32_t first = stage + (lane / 16 * 8 + lane % 8) * QUERY_PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int step = 0; step < WARP_STEPS; ++step) {
            uint32_t r[4];
            ldmatrix_x4(r, first + query_byte(step, column_share(warp)));
            b[step][0][0] = r[0], b[step][0][1] = r[1], b[step][1][0] = r[2], b[step][1][1] = r[3];
        }
    }
};

using AllScores = float[2][4];  // as Scores, for all rows

// S^T of the warp's keys and columns, scaled if these are all; `keys` is the lane's offset in the first 32 bytes.
DEVICE void multiply_keys(uint32_t keys, const Queries& q, AllScores& s) {
    constexpr int LOADS = KV_E4M3 ? WARP_STEPS / 2 : WARP_STEPS;  // of 32 bytes of each key
    float chain[CHAINS][2][4];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c)
#pragma unroll
        for (int i = 0; i < 8; ++i) chain[c][i / 4][i % 4] = 0.f;
    uint32_t raw[AHEAD + 1][4];
#pragma unroll
    for (int load = 0; load < AHEAD; ++load) ldmatrix_x4(raw[load], step_offset(keys, load * COLUMN_SHARES));
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        if (load + AHEAD < LOADS)
            ldmatrix_x4(raw[(load + AHEAD) % (AHEAD + 1)], step_offset(keys, (load + AHEAD) * COLUMN_SHARES));
        const uint32_t (&r)[4] = raw[load % (AHEAD + 1)];
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
            s[n][i] =
                COLUMN_SHARES > 1 ? chain[0][n][i] : (chain[0][n][i] + chain[CHAINS - 1][n][i]) * q.scale_of(n, i % 2);
        }
}

// The thread's rows: what is subtracted from base-2 exponents, and the sums over this thread's keys.
struct Rows {
    float maximum[ROW_EIGHTS][2];
    float sum[ROW_EIGHTS][2];
#if SPARSE && KV_E4M3
    // Of two blocks: scales of one of the warp's keys in this tile, and powers of two. Outputs of a block's columns are
    // multiples of its power, so that scales and probabilities together fit fp16.
    float scale[2];
    float unit[2];
#endif
};
constexpr float UNIT_SLACK = 128.f;  // by which a scale may exceed its unit

// The first of the lane's two blocks; the lane's key is lane / 2 of the warp's.
DEVICE int scale_block() { return threadIdx.x % 2 * 2; }

// Publishes to the other warps whether the thread's scores exceed its maxima by too much.
DEVICE void publish_check(const Scores& s, const Rows& rows, int warp, ScoreCheck& score_check) {
    bool over = false;
#pragma unroll
    for (int n = 0; n < ROW_EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) over |= fmaxf(s[n][i], s[n][i + 2]) > rows.maximum[n][i] + MAXIMUM_SLACK;
#if SPARSE && KV_E4M3
#pragma unroll
    for (int i = 0; i < 2; ++i) over |= rows.scale[i] > rows.unit[i] * UNIT_SLACK;
#endif
    const bool any = __any_sync(~0u, over);
    if (threadIdx.x % 32 == 0) {
        score_check.over[warp] = any;
        mbarrier_arrive(shared_address(&score_check.full));
    }
}

#if SPARSE && KV_E4M3
DEVICE void publish_top_scales(const Rows& rows, int warp, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = rows.scale[i];
        for (int other = 2; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
        if (lane < 2 && first_row(warp) == 0) shared.top_scale[key_warp(warp)][scale_block() + i] = top;
    }
}

// Of a power of two between 2^-126 and 2^126.
DEVICE float inverse_of(float power) { return __uint_as_float((2 * 127 << 23) - __float_as_uint(power)); }

DEVICE void raise_units(int warp, const SharedStorage& shared, Probabilities& p, Rows& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int block = scale_block() + i;
        float top = shared.top_scale[0][block];
        for (int w = 1; w < KEY_WARPS; ++w) top = fmaxf(top, shared.top_scale[w][block]);
        const float before = rows.unit[i];
        if (top > before * UNIT_SLACK)
            rows.unit[i] = fminf(__uint_as_float(__float_as_uint(top) & 0x7f800000), power_of_two(100));
        if (warp == 0 && threadIdx.x % 32 < 2) p.block_factor[block] = before * inverse_of(rows.unit[i]);
    }
}

// Factors of the lane's key, for P of the columns of two blocks.
DEVICE void publish_value_factors(const Rows& rows, int warp, Probabilities& p) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
        p.value_factor[scale_block() + i][warp * 16 + threadIdx.x % 32 / 2] =
            static_cast<uint16_t>(pack_fp16(rows.scale[i] * inverse_of(rows.unit[i]), 0.f));
}
#else
DEVICE void publish_top_scales(const Rows&, int, const SharedStorage&) {}
DEVICE void raise_units(int, const SharedStorage&, const Probabilities&, const Rows&) {}
DEVICE void publish_value_factors(const Rows&, int, const Probabilities&) {}
#endif

// Raises the maxima that need it, in step with the other warps, and publishes the factors for the PV warps.
DEVICE void raise_maxima(const Scores& s, int warp, SharedStorage& shared, Probabilities& p, Rows& rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROW_EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = fmaxf(s[n][i], s[n][i + 2]);
            for (int other = 4; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
            if (lane < 4) shared.top[key_warp(warp)][first_row(warp) + n * 8 + lane * 2 + i] = top;
        }
    publish_top_scales(rows, warp, shared);
    named_barrier_sync<QK_WARPS * 32>(QK_BARRIER);
#pragma unroll
    for (int n = 0; n < ROW_EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row(warp) + n * 8 + lane % 4 * 2 + i;
            float top = shared.top[0][row];
            for (int w = 1; w < KEY_WARPS; ++w) top = fmaxf(top, shared.top[w][row]);
            const float before = rows.maximum[n][i];
            if (top > before + MAXIMUM_SLACK) rows.maximum[n][i] = top;
            const float factor = exp2_approximate(before - rows.maximum[n][i]);
            rows.sum[n][i] *= factor;
            if (key_warp(warp) == 0 && lane < 4) p.factor[row] = factor;
        }
    raise_units(warp, shared, p, rows);
}

// Publishes the P^T of a tile to the PV warps, once all QK warps have published their checks; with scaled rows the
// caller has waited for the stage.
DEVICE void publish_probabilities(Scores& s, int warp, const PipelineState<P_STAGES>& p_state, SharedStorage& shared,
                                  Rows& rows) {
    const int lane = threadIdx.x % 32;
    Probabilities& p = shared.p[p_state.index];
    wait_barrier(shared.score_check[p_state.index].full, p_state.phase);
    bool raised = false;
    for (int i = 0; i < QK_WARPS; i += 4) {
        const uint4 over = *reinterpret_cast<const uint4*>(shared.score_check[p_state.index].over + i);
        raised |= static_cast<bool>(over.x | over.y | over.z | over.w);
    }
    if constexpr (!SCALED) wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
    if (raised) raise_maxima(s, warp, shared, p, rows);
    if (warp == 0 && lane == 0) p.raised = raised;
    if (first_row(warp) == 0) publish_value_factors(rows, key_warp(warp), p);
    uint32_t fragment[ROW_EIGHTS][2];
#pragma unroll
    for (int n = 0; n < ROW_EIGHTS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = exp2_approximate(s[n][i] - rows.maximum[n][i % 2]);
        for (int i = 0; i < 2; ++i) rows.sum[n][i] += s[n][i] + s[n][i + 2];
        for (int half = 0; half < 2; ++half)
            fragment[n][half] = transpose_8x8(pack_pair(s[n][half * 2], s[n][half * 2 + 1]));
    }
    if constexpr (ROW_EIGHTS == 1)
        reinterpret_cast<uint2*>(&p.fragment[0][key_warp(warp)][lane])[first_row(warp) / 8] =
            make_uint2(fragment[0][0], fragment[0][1]);
    else
#pragma unroll
        for (int n = 0; n < ROW_EIGHTS; n += 2)
            p.fragment[n / 2][warp][lane] =
                make_uint4(fragment[n][0], fragment[n][1], fragment[n + 1][0], fragment[n + 1][1]);
    release(shared.p_full[p_state.index]);
}

}  // namespace paged_mla_decode
