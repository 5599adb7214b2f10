// How QK warps and PV warps of the sparse kernel go through the tiles that the producers put together from a list.
#pragma once
#include "../few_rows/qk.cuh"
#include "cluster_tiles.cuh"

namespace paged_mla_decode {

// Writes -inf for the keys of a tile that do not exist, whose rows hold arbitrary bytes.
DEVICE void mask_missing(int valid, int warp, Scores& s) {
    const int key = key_warp(warp) * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < ROW_EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (key + i / 2 * 8 >= valid) s[n][i] = -INFINITY;
}

#if KV_E4M3
DEVICE float load_shared_float(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// S^T of the warp's keys and columns, scaled: each block of columns in sums of its own, which are then multiplied by the
// key's scale of that block, and the rope columns in bf16. `row` is the address of the lane's key in the tile, as ldmatrix
// takes it; `scales` that of the scales of its score's first key.
DEVICE void multiply_scaled_keys(uint32_t row, uint32_t scales, int share, const Queries& q, AllScores& s) {
    constexpr int LOADS = LATENT / 32 / COLUMN_SHARES, ROPE_LOADS = ROPE / 16 / COLUMN_SHARES;
    constexpr int BLOCKS = SCALE_BLOCKS / COLUMN_SHARES, BLOCK_LOADS = LOADS / BLOCKS;
    float chain[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = 0.f;
    const uint32_t latent = row + share * LOADS * 32, rope = row + ROPE_BYTE + share * ROPE_LOADS * 32;
    const auto address = [&](int load) { return load < LOADS ? latent + load * 32 : rope + (load - LOADS) * 32; };
    uint32_t raw[AHEAD + 1][4];
#pragma unroll
    for (int load = 0; load < AHEAD; ++load) ldmatrix_x4(raw[load], address(load));
#pragma unroll
    for (int load = 0; load < LOADS + ROPE_LOADS; ++load) {
        if (load + AHEAD < LOADS + ROPE_LOADS)
            ldmatrix_x4(raw[(load + AHEAD) % (AHEAD + 1)], address(load + AHEAD));
        const uint32_t(&r)[4] = raw[load % (AHEAD + 1)];
        if (load % BLOCK_LOADS == 0 && load <= LOADS)
#pragma unroll
            for (int i = 0; i < 8; ++i) chain[i / 4][i % 4] = 0.f;
        if (load >= LOADS) {
            const int step = WARP_CONVERTED_STEPS + load - LOADS;
#pragma unroll
            for (int n = 0; n < 2; ++n) mma_bf16_16x8x16(chain[n], r, q.b[step][n][0], q.b[step][n][1]);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int step = load * 2 + half;
            uint32_t k[4];
            e4m3_to_fp16(r[half * 2], k[0], k[2]);
            e4m3_to_fp16(r[half * 2 + 1], k[1], k[3]);
#pragma unroll
            for (int n = 0; n < 2; ++n) multiply(chain[n], k, q.b[step][n][0], q.b[step][n][1]);
        }
        if (load % BLOCK_LOADS == BLOCK_LOADS - 1) {
            const uint32_t own = scales + (share * BLOCKS + load / BLOCK_LOADS) * 4;
            const float scale[2] = {load_shared_float(own), load_shared_float(own + 8 * KEY_PITCH)};
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[n][i] = __fmaf_rn(chain[n][i], scale[i / 2], s[n][i]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[n][i] *= q.scale_of(n, i % 2);
            if (ROPE > 0) s[n][i] += chain[n][i] * q.rope_scale;
        }
}

// The scales of the lane's key, whose row begins at `key`, of two blocks; 0 if there is no such key.
DEVICE void load_scales(uint32_t key, bool exists, float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float value = load_shared_float(key + SCALE_BYTE + (scale_block() + i) * 4);
        scale[i] = exists ? value : 0.f;
    }
}
#endif

// Adds the scores of the two warps that share the columns of 16 keys, and scales those that are not: each gets those of
// its rows.
DEVICE void add_shares(const AllScores& own, const Queries& q, int warp, float4 (&partial)[QK_WARPS][32], Scores& s,
                       bool warmup) {
    const int lane = threadIdx.x % 32, share = column_share(warp);
    const auto score = [&](int i) { return share == 0 ? own[1][i] : own[0][i]; };  // of the other's rows
    partial[warp][lane] = make_float4(score(0), score(1), score(2), score(3));
    if (!warmup) named_barrier_sync<COLUMN_SHARES * 32>(FIRST_SHARE_BARRIER + key_warp(warp));
    const float4 other = partial[(warp + KEY_WARPS) % QK_WARPS][lane];
    const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[0][i] = (share == 0 ? own[0][i] : own[1][i]) + others[i];
        if (!KV_E4M3) s[0][i] *= q.scale_of(0, i % 2);
    }
}

// Publishes maxima and sums at the end of a work tile.
DEVICE void publish_sums(Rows& rows, int warp, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROW_EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int other = 4; other < 32; other *= 2)
                rows.sum[n][i] += __shfl_xor_sync(~0u, rows.sum[n][i], other);
            const int row = first_row(warp) + n * 8 + lane * 2 + i;
            if (lane < 4) shared.sum[key_warp(warp)][row] = rows.sum[n][i];
            if (lane < 4 && key_warp(warp) == 0) shared.maximum[row] = rows.maximum[n][i];
        }
#if KV_E4M3
    if (lane < 2 && warp == 0)
        for (int i = 0; i < 2; ++i) shared.unit[scale_block() + i] = rows.unit[i];
#endif
}

// The first pass is a warm-up, while the first keys are in flight: it fetches from DRAM the code that the first tile would
// wait for, each warp a part of it. Its queries and keys are what memory for the merge holds, which nothing is sent to
// before the warm-up ends.
DEVICE void score(const Params& p, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_QK_THREAD) / 32, 0);
    const int half = key_warp(warp) / (KEY_WARPS / STAGES_OF_TILE), first_key = key_warp(warp) * 16;
    const int stage_key = first_key % (TILE_TOKENS / STAGES_OF_TILE);
    const uint32_t scratch = shared_address(&shared.merge);
    static_assert(sizeof(shared.merge) >= ROWS * QUERY_PITCH && sizeof(shared.merge) >= 16 * KEY_PITCH);
    const bool converts = warp < 2, publishes = warp >= 5, multiplies = !converts && !publishes;  // in the warm-up
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    uint32_t sums_parity = 0;
    ClusterTileIterator work_tiles(p);
    WorkTile work;
    work.rows = work.row_tile = work.q_begin = 0;
#pragma unroll 1
    for (bool warmup = true; warmup || work_tiles.next(work); warmup = false) {
        Queries q;
        if (!warmup) wait_barrier(shared.full[kv_state.index], kv_state.phase);
        if (!warmup || converts)
            q.load(p, work, shared, warmup ? scratch : shared_address(shared.stages[kv_state.index]), warp, warmup);
        if (!warmup) {
            // otherwise the arrival may overtake loads of fragments, and a copy may come before they read
            fence_async_proxy();
            release(shared.empty[kv_state.index]);
            kv_state.advance();
        }
        Rows rows;
#pragma unroll
        for (int i = 0; i < ROW_EIGHTS * 2; ++i) rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
#if KV_E4M3
        for (int i = 0; i < 2; ++i) rows.unit[i] = power_of_two(-100);
#endif
#pragma unroll 1
        for (bool last = false; !last;) {
            uint32_t tile = LAST_TILE;
            if (!warmup) {
                kv_state.advance(half);
                wait_barrier(shared.full[kv_state.index], kv_state.phase);
                tile = shared.tile[kv_state.index];
            }
            last = tile & LAST_TILE;
            Scores s;
            if (!warmup || multiplies) {
                const int valid = tile & ~LAST_TILE;
                const uint32_t stage =
                    warmup ? scratch - stage_key * KEY_PITCH : shared_address(shared.stages[kv_state.index]);
                const uint32_t keys = stage + stage_offset(lane / 16 * 16, stage_key + lane % 16);
                AllScores all;
#if KV_E4M3
                multiply_scaled_keys(keys, stage + stage_offset(SCALE_BYTE, stage_key + lane / 4), column_share(warp), q,
                                     all);
                load_scales(stage + stage_offset(0, stage_key + lane / 2), first_key + lane / 2 < valid, rows.scale);
#else
                multiply_keys(keys + column_share(warp) * 32, q, all);
#endif
                add_shares(all, q, warp, shared.partial_scores, s, warmup);
                if (valid < TILE_TOKENS) mask_missing(valid, warp, s);
            }
            if (!warmup || publishes) {
                publish_check(s, rows, warp, shared.score_check[p_state.index], warmup);
                publish_probabilities(s, warp, p_state, shared, rows, warmup);
            }
            if (!warmup) kv_state.advance(STAGES_OF_TILE - half), p_state.advance();
        }
        if (!warmup) wait_barrier(shared.sums_empty, sums_parity ^ 1), sums_parity ^= 1;
        publish_sums(rows, warp, shared);
        if (warmup)
            cluster_arrive_relaxed();
        else
            release(shared.sums_full);
    }
}

DEVICE void consume(const Params& p, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t values = stage_offset(warp * 64 * (KV_E4M3 ? 1 : 2) + lane / 8 % 2 * 16, lane / 16 * 8 + lane % 8);
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    uint32_t sums_parity = 0, merge_parity = 0;
    ClusterTileIterator work_tiles(p);
    WorkTile work;
    work.rows = work.row_tile = work.q_begin = 0;
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
            uint32_t stage[STAGES_OF_TILE];
            PipelineState<STAGES> next = kv_state;
#pragma unroll
            for (int i = 0; i < STAGES_OF_TILE; ++i, next.advance()) {
                wait_barrier(shared.full[next.index], next.phase);
                stage[i] = shared_address(shared.stages[next.index]) + values;
            }
            const uint32_t tile = shared.tile[kv_state.index];
            last = tile & LAST_TILE;
            if (own.raised) rescale(own, out);
            const int valid = tile & ~LAST_TILE;
            if (valid < TILE_TOKENS)
                multiply_values<true>(stage, valid, own, out);
            else
                multiply_values<false>(stage, valid, own, out);
            // orders the reads, which may still be in flight, before the copies that reuse the stages
            fence_async_proxy();
#pragma unroll
            for (int i = 0; i < STAGES_OF_TILE; ++i, kv_state.advance()) release(shared.empty[kv_state.index]);
            release(shared.p_empty[p_state.index]);
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
        if (gridDim.x == 1) {
            store_groups(p, work, warp, statistics, out);
            continue;
        }
        if (!warmup) {
            // until the CTAs of the cluster have read what they were sent before
            wait_cluster_barrier(shared.merge_empty, merge_parity ^ 1);
            send_groups(warp, statistics, out, shared);
            wait_barrier(shared.merge_full, merge_parity);
            merge_parity ^= 1;
        }
        merge_groups(p, work, warp, shared);
        if (!warmup && work_tiles.has_next())
            for (int rank = 0; rank < gridDim.x; ++rank) release_in_cta(shared.merge_empty, rank);
        if (warmup) cluster_wait();
    }
}

}  // namespace paged_mla_decode
