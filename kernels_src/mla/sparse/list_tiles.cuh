// How QK warps and PV warps of the sparse kernel go through the tiles that the producers put together from a list.
#pragma once
#include "../few_rows/pv.cuh"
#include "../few_rows/qk.cuh"

namespace paged_mla_decode {

// Writes -inf for the keys of a tile that do not exist, whose rows hold arbitrary bytes.
DEVICE void mask_missing(int valid, int warp, Scores& s) {
    const int key = warp * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (key + i / 2 * 8 >= valid) s[n][i] = -INFINITY;
}

#if KV_E4M3
// S^T of the warp's keys, scaled: each block of columns in sums of its own, which are then multiplied by the key's scale
// of that block, and the rope columns in bf16. `row` is the address of the lane's key in the tile, as ldmatrix takes it;
// `scales` that of the scales of its score's first key.
DEVICE void multiply_scaled_keys(uint32_t row, uint32_t scales, const Queries& q, Scores& s) {
    constexpr int LOADS = LATENT / 32, BLOCK_LOADS = LOADS / SCALE_BLOCKS, ROPE_LOADS = ROPE / 16;
    static_assert(SCALE_BLOCKS == 4, "the scales of a key are one load");
    float sum[2][4], chain[CHAINS][2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = 0.f;
    const auto clear = [&] {
#pragma unroll
        for (int c = 0; c < CHAINS; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) chain[c][i / 4][i % 4] = 0.f;
    };
    const auto address = [&](int load) {
        return row + (load < LOADS ? load * 32 : ROPE_BYTE + (load - LOADS) * 32);
    };
    const uint4 packed[2] = {load_shared_uint4(scales), load_shared_uint4(scales + 8 * KEY_PITCH)};
    uint32_t raw[AHEAD + 1][4];
#pragma unroll
    for (int load = 0; load < AHEAD; ++load) ldmatrix_x4(raw[load], address(load));
#pragma unroll
    for (int load = 0; load < LOADS + ROPE_LOADS; ++load) {
        if (load + AHEAD < LOADS + ROPE_LOADS)
            ldmatrix_x4(raw[(load + AHEAD) % (AHEAD + 1)], address(load + AHEAD));
        const uint32_t(&r)[4] = raw[load % (AHEAD + 1)];
        if (load % BLOCK_LOADS == 0 && load <= LOADS) clear();
        if (load >= LOADS) {
            const int step = CONVERTED_STEPS + load - LOADS;
#pragma unroll
            for (int n = 0; n < 2; ++n)
                mma_bf16_16x8x16(chain[step % CHAINS][n], r, q.b[step][n][0], q.b[step][n][1]);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int step = load * 2 + half;
            uint32_t k[4];
            e4m3_to_fp16(r[half * 2], k[0], k[2]);
            e4m3_to_fp16(r[half * 2 + 1], k[1], k[3]);
#pragma unroll
            for (int n = 0; n < 2; ++n) multiply(chain[step % CHAINS][n], k, q.b[step][n][0], q.b[step][n][1]);
        }
        if (load % BLOCK_LOADS == BLOCK_LOADS - 1) {
            const int block = load / BLOCK_LOADS;
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint4& four = packed[i / 2];
                    const uint32_t bits = block == 0 ? four.x : block == 1 ? four.y : block == 2 ? four.z : four.w;
                    sum[n][i] = __fmaf_rn(chain[0][n][i] + chain[1][n][i], __uint_as_float(bits), sum[n][i]);
                }
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[n][i] = sum[n][i] * q.scale_of(n, i % 2);
            if (ROPE > 0) s[n][i] += (chain[0][n][i] + chain[1][n][i]) * q.rope_scale;
        }
}

// The scales of the lane's key, whose row begins at `key`, of two blocks; 0 if there is no such key.
DEVICE void load_scales(uint32_t key, bool exists, float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float value;
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(value)
                     : "r"(key + SCALE_BYTE + (scale_block() + i) * 4)
                     : "memory");
        scale[i] = exists ? value : 0.f;
    }
}
#endif

// Publishes maxima and sums at the end of a work tile.
DEVICE void publish_sums(Rows& rows, int warp, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
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
#if SPARSE && KV_E4M3
    if (lane < 2 && warp == 0)
        for (int i = 0; i < 2; ++i) shared.unit[scale_block() + i] = rows.unit[i];
#endif
    release(shared.sums_full);
}

DEVICE void score(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_QK_THREAD) / 32, 0);
    const uint32_t keys = stage_offset(lane / 16 * 16, warp * 16 + lane % 16);
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    uint32_t sums_parity = 0;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        Queries q;
        wait_barrier(shared.full[kv_state.index], kv_state.phase);
        q.load(p, work, shared, shared_address(shared.stages[kv_state.index]), warp);
        // otherwise the arrival may overtake loads of fragments, and a copy may come before they read
        fence_async_proxy();
        __syncwarp();
        if (lane < CONSUMER_WARPS / QK_WARPS) mbarrier_arrive(shared_address(&shared.empty[kv_state.index]));
        kv_state.advance();
        Rows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
#if KV_E4M3
        for (int i = 0; i < 2; ++i) rows.unit[i] = power_of_two(-100);
        float scale[2];
#endif
        Scores s;
        const auto multiply_tile = [&] {
            wait_barrier(shared.full[kv_state.index], kv_state.phase);
            const uint32_t tile = shared.tile[kv_state.index];
            const int valid = tile & ~LAST_TILE;
            const uint32_t stage = shared_address(shared.stages[kv_state.index]);
#if KV_E4M3
            multiply_scaled_keys(stage + keys, stage + stage_offset(SCALE_BYTE, warp * 16 + lane / 4), q, s);
            load_scales(stage + stage_offset(0, warp * 16 + lane / 2), warp * 16 + lane / 2 < valid, scale);
#else
            multiply_keys(stage + keys, q, s);
#endif
            if (valid < TILE_TOKENS) mask_missing(valid, warp, s);
            kv_state.advance();
            return tile;
        };
        uint32_t tile = multiply_tile();
#pragma unroll 1
        for (bool last = false; !last;) {
            last = tile & LAST_TILE;
#if KV_E4M3
            for (int i = 0; i < 2; ++i) rows.scale[i] = scale[i];
#endif
            publish_check(s, rows, warp, shared.score_check[p_state.index]);
            Scores own;
#pragma unroll
            for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = s[i / 4][i % 4];
            if (LOOK_AHEAD && !last) tile = multiply_tile();
            publish_probabilities(own, warp, p_state, shared, rows);
            if (!LOOK_AHEAD && !last) tile = multiply_tile();
            p_state.advance();
        }
        wait_barrier(shared.sums_empty, sums_parity ^ 1);
        sums_parity ^= 1;
        publish_sums(rows, warp, shared);
    }
}

// Returns whether there were partials.
DEVICE bool consume(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t values = stage_offset(warp * 64 * (KV_E4M3 ? 1 : 2) + lane / 8 % 2 * 16, lane / 16 * 8 + lane % 8);
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    uint32_t sums_parity = 0;
    // counter of the latest partial; its arrival is published with the next one, when the stores had time
    int written = -1;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    work.rows = work.first = work.last = work.kv_len = work.row_tile = work.q_begin = 0;
    work.splits.count = 1;
    // The first pass is a warm-up without rows, while the first keys are in flight: it fetches from DRAM the code
    // that everything waits for at the end.
#pragma unroll 1
    for (bool warmup = true; warmup || work_tiles.next(work); warmup = false) {
        Output out;
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[m][i / 4][i % 4] = 0.f;
        if (!warmup) kv_state.advance();  // the stage of the queries
#pragma unroll 1
        for (bool last = warmup; !last;) {
            const Probabilities& own = shared.p[p_state.index];
            wait_barrier(shared.p_full[p_state.index], p_state.phase);
            wait_barrier(shared.full[kv_state.index], kv_state.phase);
            const uint32_t tile = shared.tile[kv_state.index];
            last = tile & LAST_TILE;
            if (own.raised) rescale(own, out);
            const uint32_t stage = shared_address(shared.stages[kv_state.index]) + values;
            const int valid = tile & ~LAST_TILE;
            if (valid < TILE_TOKENS)
                multiply_values<true>(stage, valid, own, out);
            else
                multiply_values<false>(stage, valid, own, out);
            // orders the reads, which may still be in flight, before the copies that reuse the stage
            fence_async_proxy();
            release(shared.empty[kv_state.index]);
            release(shared.p_empty[p_state.index]);
            kv_state.advance();
            p_state.advance();
        }
        if (!warmup) wait_barrier(shared.sums_full, sums_parity);
        float2 statistics[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) statistics[i / 2][i % 2] = row_statistics(shared, i / 2 * 8 + lane % 4 * 2 + i % 2);
#if KV_E4M3
        const float unit = shared.unit[scale_block_of_warp()];
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[m][i / 4][i % 4] *= unit;
#endif
        __threadfence_block();  // otherwise the arrival may overtake these loads
        if (!warmup) release(shared.sums_empty), sums_parity ^= 1;
        if (work.whole()) {
            store_rows(p, work, statistics, out);
        } else {
            if (written >= 0) {
                named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
                arrive(p, written);
            }
            store_partial(p, work, statistics, out);
            written = work.splits.counter;
        }
    }
    if (written < 0) return false;
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    arrive(p, written);
    return true;
}

}  // namespace paged_mla_decode
