// How PV warps of the sparse kernel in clusters go through the tiles that the producers put together from a list, and
// what QK warps do in the same way with rows of any form.
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

// Publishes maxima and sums at the end of a work tile, once PV warps have read those of the tile before. At the end of a
// warm-up nobody reads them, and the other CTAs may send to this one.
DEVICE void publish_sums(Rows& rows, int warp, uint32_t& sums_parity, SharedStorage& shared, bool warmup) {
    const int lane = threadIdx.x % 32;
    if (!warmup) wait_barrier(shared.sums_empty, sums_parity ^ 1), sums_parity ^= 1;
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
    if (warmup)
        cluster_arrive_relaxed();
    else
        release(shared.sums_full);
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
    [[maybe_unused]] Output earlier;  // the output tile's part before
    [[maybe_unused]] Statistics earlier_statistics;
    // The first pass is a warm-up without rows, while the first keys are in flight: it fetches from DRAM the code
    // that everything waits for at the end.
#pragma unroll 1
    for (bool warmup = true; warmup || work_tiles.next(work); warmup = false) {
        Output out;
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) out[m][i / 4][i % 4] = 0.f;
        const int query_stage = kv_state.index;
        if (QUERIES_IN_STAGE && !warmup) kv_state.advance();
#pragma unroll 1
        for (bool last = warmup, first = true; !last; first = false) {
            const Probabilities& own = shared.p[p_state.index];
            wait_barrier(shared.p_full[p_state.index], p_state.phase);
            // Stages become free in their order: two warps fill every second one, and could take the parity of a phase
            // for that of the one after the next.
            if (QUERIES_IN_STAGE && first) release(shared.empty[query_stage]);
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
        Statistics statistics;
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i)
            statistics[i / 2][i % 2] = row_statistics(shared, i / 2 * 8 + lane % 4 * 2 + i % 2);
#if KV_E4M3
        const float unit = shared.unit[scale_block_of_warp()];
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) out[m][i / 4][i % 4] *= unit;
#endif
        __threadfence_block();  // otherwise the arrival may overtake these loads
        if (!warmup) release(shared.sums_empty), sums_parity ^= 1;
        if constexpr (CTA_PARTS > 1) {
            if (!work_tiles.begins_output_tile()) add_part(earlier_statistics, earlier, statistics, out);
            if (!work_tiles.ends_output_tile()) {
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
                    for (int i = 0; i < ROWS / 2; ++i) earlier[m][i / 4][i % 4] = out[m][i / 4][i % 4];
#pragma unroll
                for (int i = 0; i < ROWS / 4; ++i) earlier_statistics[i / 2][i % 2] = statistics[i / 2][i % 2];
                continue;
            }
        }
        if (gridDim.x == 1) {
            store_groups(p, work, warp, statistics, out);
        } else {
#pragma unroll 1
            for (int half = 0; half < ROWS / 16; ++half) {
                if (!warmup) {
                    // until the CTAs of the cluster have read what they were sent before
                    wait_cluster_barrier(shared.merge_empty, merge_parity ^ 1);
                    if (half == 0)
                        send_groups<0>(warp, statistics, out, shared);
                    else
                        send_groups<ROWS / 16 - 1>(warp, statistics, out, shared);
                    wait_barrier(shared.merge_full, merge_parity);
                    merge_parity ^= 1;
                }
                merge_groups(p, work, warp, half, shared);
                if (!warmup && (half + 1 < ROWS / 16 || work_tiles.has_next()))
                    for (int rank = 0; rank < gridDim.x; ++rank) release_in_cta(shared.merge_empty, rank);
            }
        }
        if (warmup) wait_for_cluster();  // until the other CTAs have begun and need their memory for no warm-up
    }
}

}  // namespace paged_mla_decode
