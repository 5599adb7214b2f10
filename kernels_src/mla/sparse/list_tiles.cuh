// How PV warps of the sparse kernel in clusters go through the tiles that the producers put together from a list, and
// what QK warps do in the same way with rows of any form.
#pragma once
#include "../few_rows/qk.cuh"
#include "row_weights.cuh"
#if KV_E4M3
#include "scaled_queries.cuh"
#endif

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

// Publishes P of a tile's scores, of which `valid` keys exist.
DEVICE void publish_scores(Scores& s, int valid, int warp, const PipelineState<P_STAGES>& p_state,
                           SharedStorage& shared, Rows& rows) {
    if (valid < TILE_TOKENS) mask_missing(valid, warp, s);
    publish_check(s, rows, warp, shared.score_check[p_state.index]);
    publish_probabilities(s, warp, p_state, shared, rows);
}

// Publishes maxima and sums at the end of a work tile, and of scaled rows units, once PV warps have read those of the
// tile before.
DEVICE void publish_sums(Rows& rows, int warp, uint32_t& sums_parity, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    if (KV_E4M3) wait_barrier(shared.sums_empty, sums_parity ^ 1), sums_parity ^= 1;
#pragma unroll
    for (int n = 0; n < ROW_EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int other = 4; other < 32; other *= 2) rows.sum[n][i] += __shfl_xor_sync(~0u, rows.sum[n][i], other);
            const int row = first_row(warp) + n * 8 + lane * 2 + i;
            if (lane < 4) shared.sum[key_warp(warp)][row] = rows.sum[n][i];
            if (lane < 4 && key_warp(warp) == 0) shared.maximum[row] = rows.maximum[n][i];
        }
#if KV_E4M3
    if (lane < 2 && warp == 0)
        for (int i = 0; i < 2; ++i) shared.unit[scale_block() + i] = rows.unit[i];
#endif
    release(shared.sums_full);
}

DEVICE void consume(const Params& p, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t values =
        stage_offset(first_column(warp, 0) * (KV_E4M3 ? 1 : 2) + lane / 8 % 2 * 16, lane / 16 * 8 + lane % 8);
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    [[maybe_unused]] uint32_t sums_parity = 0;
    uint32_t full_parity = 0, tile_parity = 0;
    ClusterTileIterator work_tiles(p);
    WorkTile work;
    [[maybe_unused]] Output earlier;  // the output tile's part before
#if KV_E4M3
    convert_first_queries(work_tiles, kv_state, shared, warp);
#endif
    wait_for_cluster();  // the other CTAs have begun, and may be sent to
#pragma unroll 1
    while (work_tiles.next(work)) {
        Output out;
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) out[m][i / 4][i % 4] = 0.f;
        const PipelineState<STAGES> query_state = kv_state;
        kv_state.advance(QUERY_STAGES);
#pragma unroll 1
        for (bool last = false, first = true; !last; first = false) {
            const Probabilities& own = shared.p[p_state.index];
            wait_barrier(shared.p_full[p_state.index], p_state.phase);
            // Stages become free in their order: two warps fill every second one, and could take the parity of a phase
            // for that of the one after the next.
            if (first) {
                PipelineState<STAGES> queries = query_state;
#pragma unroll
                for (int i = 0; i < QUERY_STAGES; ++i, queries.advance()) release(shared.empty[queries.index]);
            }
            uint32_t stage[STAGES_OF_TILE];  // full, as QK warps have read them
            PipelineState<STAGES> next = kv_state;
#pragma unroll
            for (int i = 0; i < STAGES_OF_TILE; ++i, next.advance())
                stage[i] = shared_address(shared.stages[next.index]) + values;
            const uint32_t tile = shared.tile[kv_state.index];
            last = tile & LAST_TILE;
            const int valid = tile & ~LAST_TILE;
            if (own.raised) rescale(own, out);
            if (valid < TILE_TOKENS) clear_missing_values(shared, kv_state, valid);
            multiply_values(stage, own, out);
            // orders the reads, which may still be in flight, before the copies that reuse the stages
            fence_async_proxy();
#pragma unroll
            for (int i = 0; i < STAGES_OF_TILE; ++i, kv_state.advance()) release(shared.empty[kv_state.index]);
            release(shared.p_empty[p_state.index]);
            p_state.advance();
        }
#if KV_E4M3
        wait_barrier(shared.sums_full, sums_parity);
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m) {
            const float unit = shared.unit[scale_block_of_warp()];
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) out[m][i / 4][i % 4] *= unit;
        }
        if (work_tiles.has_next()) {
            __threadfence_block();  // otherwise the arrival may overtake these loads
            release(shared.sums_empty);
        }
        sums_parity ^= 1;
#endif
        if constexpr (CTA_PARTS > 1) {
            if (!work_tiles.ends_output_tile()) {
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
                    for (int i = 0; i < ROWS / 2; ++i) earlier[m][i / 4][i % 4] = out[m][i / 4][i % 4];
                continue;
            }
        }
        const bool parts = CTA_PARTS > 1 && !work_tiles.begins_output_tile();
        const auto wait_for_weights = [&] { wait_barrier(shared.weights_full, tile_parity); };
        if (CTA_PARTS > 1 && parts) {
            wait_for_weights();
            add_part(shared.part_weights, earlier, out);
        }
        if (gridDim.x == 1) {
            wait_for_weights();
            store_groups(p, work, warp, shared, out);
        } else {
            // until the CTAs of the cluster have read what they were sent before
            wait_barrier(shared.tile_done, tile_parity ^ 1);
#pragma unroll 1
            for (int half = 0; half < ROWS / 16; ++half) {
                if (half > 0) wait_barrier(shared.merge_empty, tile_parity);
                send_groups(warp, out, shared);
                wait_barrier(shared.merge_full, full_parity);
                full_parity ^= 1;
                wait_for_weights();
                merge_groups(p, work, warp, half, shared);
                if constexpr (ROWS == 32) {
                    if (half == 0) release_in_cluster(shared.merge_empty);
#pragma unroll
                    for (int i = 0; i < COLUMN_TILES * 8; ++i)
                        out[i / 8][i / 4 % 2][i % 4] = out[i / 8][2 + i / 4 % 2][i % 4];
                }
            }
        }
        if (work_tiles.has_next()) release_in_cluster(shared.tile_done);
        tile_parity ^= 1;
    }
}

}  // namespace paged_mla_decode
