// How QK warps and PV warps of the kernel for few rows go through the tiles of a paged cache.
#pragma once
#include "pv.cuh"
#include "qk.cuh"

namespace paged_mla_decode {

// Writes -inf where a row does not see the key. Bit j of `visible`: the row sees key `prefix` + j; every row sees the
// keys before `prefix`.
DEVICE void mask_scores(const WorkTile& work, int tile, const uint32_t (&visible)[ROWS], int warp, Scores& s) {
    const int lane = threadIdx.x % 32;
    const int draft = tile * TILE_TOKENS + warp * 16 + lane / 4 - (work.kv_len - work.q_len);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = draft + i / 2 * 8;
            const bool seen = own < 0 || (own < 32 && (visible[n * 8 + lane % 4 * 2 + i % 2] >> own & 1));
            if (!seen) s[n][i] = -INFINITY;
        }
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
        if (lane < ROWS) shared.visible[warp][lane] = visible_drafts(p, work, lane);
        Queries q;
        wait_barrier(shared.full[kv_state.index], kv_state.phase);
        q.load(p, work, shared, shared_address(shared.stages[kv_state.index]), warp);
        // otherwise the arrival may overtake loads of fragments, and a TMA write may come before they read
        fence_async_proxy();
        __syncwarp();
        if (lane < CONSUMER_WARPS / QK_WARPS) mbarrier_arrive(shared_address(&shared.empty[kv_state.index]));
        kv_state.advance();
        Rows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
        const int last = work.first + work.key_tiles();
        Scores s, checked;
        const auto publish = [&](Scores& own) {
            publish_probabilities(own, warp, p_state, shared, rows);
            p_state.advance();
        };
        // One piece of code multiplies the first tile and all others: the first waits for code that comes from DRAM.
#pragma unroll 1
        for (int tile = work.first; tile < last + LOOK_AHEAD; ++tile) {
            if (!LOOK_AHEAD || tile < last) {
                wait_barrier(shared.full[kv_state.index], kv_state.phase);
                multiply_keys(shared_address(shared.stages[kv_state.index]) + keys, q, s);
                kv_state.advance();
            }
            // Where Q K^T takes longest, this tile was multiplied before waiting for the other warps' checks of the
            // one before.
            if (LOOK_AHEAD && tile > work.first) publish(checked);
            if (LOOK_AHEAD && tile == last) break;
            if ((tile + 1) * TILE_TOKENS > work.kv_len - work.q_len)
                mask_scores(work, tile, shared.visible[warp], warp, s);
            publish_check(s, rows, warp, shared.score_check[p_state.index]);
            if (!LOOK_AHEAD) publish(s);
#pragma unroll
            for (int i = 0; i < 8; ++i) checked[i / 4][i % 4] = s[i / 4][i % 4];
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

// Returns whether there were partials.
DEVICE bool consume(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const bool has_columns = !PADDED || warp * 64 < LATENT;
    const uint32_t values = stage_offset(warp * 64 * (KV_E4M3 ? 1 : 2) + lane / 8 % 2 * 16, lane / 16 * 8 + lane % 8);
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    uint32_t sums_parity = 0;
    // counter of the latest partial; its arrival is published with the next one, when the stores had time
    int written = -1;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
#pragma unroll 1
    while (work_tiles.next(work)) {
        Output out;
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[m][i / 4][i % 4] = 0.f;
        kv_state.advance();  // the stage of the queries
        const int last = work.first + work.key_tiles();
#pragma unroll 1
        for (int tile = work.first; tile < last; ++tile) {
            const Probabilities& own = shared.p[p_state.index];
            wait_barrier(shared.p_full[p_state.index], p_state.phase);
            wait_barrier(shared.full[kv_state.index], kv_state.phase);
            if (own.raised) rescale(own, out);
            const uint32_t stage[] = {shared_address(shared.stages[kv_state.index]) + values};
            const int valid = work.valid(tile);
            if (has_columns) {
                if (valid < TILE_TOKENS) clear_missing_values(shared, kv_state, valid);
                multiply_values(stage, own, out);
            }
            // orders the reads, which may still be in flight, before the TMA write that reuses the stage
            fence_async_proxy();
            release(shared.empty[kv_state.index]);
            release(shared.p_empty[p_state.index]);
            kv_state.advance();
            p_state.advance();
        }
        wait_barrier(shared.sums_full, sums_parity);
        const float2 statistics = row_statistics(shared, lane % 16);
        __threadfence_block();  // otherwise the arrival may overtake these loads
        release(shared.sums_empty);
        sums_parity ^= 1;
        if (work.whole()) {
            if (has_columns) store_rows(p, work, statistics, out);
        } else {
            if (written >= 0) {
                named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
                arrive(p, written);
            }
            if (has_columns) store_partial(p, work, statistics, out);
            written = work.splits.counter;
        }
    }
    if (written < 0) return false;
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    arrive(p, written);
    return true;
}

}  // namespace paged_mla_decode
