// QK warps of the sparse kernel in clusters for bf16 rows: S^T = K Q^T of 16 keys and half of the columns each, queries
// in registers.
#pragma once
#include "../few_rows/queries.cuh"
#include "list_tiles.cuh"

namespace paged_mla_decode {

// Adds the scores of the two warps that share the columns of 16 keys, and scales them: each gets those of its rows.
DEVICE void add_shares(const AllScores& own, float scale, int warp, float4 (&partial)[QK_WARPS][32], Scores& s) {
    const int lane = threadIdx.x % 32, share = column_share(warp);
    const auto score = [&](int i) { return share == 0 ? own[1][i] : own[0][i]; };  // of the other's rows
    partial[warp][lane] = make_float4(score(0), score(1), score(2), score(3));
    named_barrier_sync<COLUMN_SHARES * 32>(FIRST_SHARE_BARRIER + key_warp(warp));
    const float4 other = partial[(warp + KEY_WARPS) % QK_WARPS][lane];
    const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = ((share == 0 ? own[0][i] : own[1][i]) + others[i]) * scale;
}

DEVICE void score(const Params& p, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_QK_THREAD) / 32, 0);
    const int half = key_warp(warp) / (KEY_WARPS / STAGES_OF_TILE), first_key = key_warp(warp) * 16;
    const int stage_key = first_key % (TILE_TOKENS / STAGES_OF_TILE);
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    uint32_t sums_parity = 0;
    RowMerge row_merge;
    ClusterTileIterator work_tiles(p);
    WorkTile work;
    bool first = true;
#pragma unroll 1
    for (; work_tiles.next(work); first = false) {
        if (first) copy_first_queries(p, work, shared, warp);
        Queries q;
        wait_barrier(shared.full[kv_state.index], kv_state.phase);
        q.load(p, work, shared, shared_address(shared.stages[kv_state.index]), warp);
        fence_async_proxy();  // orders the reads before the copy that reuses the stage, which PV warps release
        kv_state.advance();
        Rows rows;
#pragma unroll
        for (int i = 0; i < ROW_EIGHTS * 2; ++i) rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
#pragma unroll 1
        for (bool last = false; !last; p_state.advance()) {
            kv_state.advance(half);
            wait_barrier(shared.full[kv_state.index], kv_state.phase);
            const uint32_t tile = shared.tile[kv_state.index], stage = shared_address(shared.stages[kv_state.index]);
            last = tile & LAST_TILE;
            const int valid = tile & ~LAST_TILE;
            Scores s;
            AllScores all;
            multiply_keys(stage + stage_offset(lane / 16 * 16, stage_key + lane % 16) + column_share(warp) * 32, q,
                          all);
            add_shares(all, q.scale_of(0, 0), warp, shared.partial_scores, s);
            publish_scores(s, valid, warp, p_state, shared, rows);
            kv_state.advance(STAGES_OF_TILE - half);
        }
        publish_sums(rows, warp, sums_parity, shared);
        if (warp == 0) row_merge.next(p, work_tiles, work, shared);
    }
    row_merge.join();
}

}  // namespace paged_mla_decode
