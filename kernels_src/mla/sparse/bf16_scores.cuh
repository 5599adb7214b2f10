// QK warps of the sparse kernel in clusters for bf16 rows: S^T = K Q^T of 16 keys and half of the columns each, queries
// in registers.
#pragma once
#include "list_tiles.cuh"

namespace paged_mla_decode {

// Adds the scores of the two warps that share the columns of 16 keys, and scales them: each gets those of its rows.
DEVICE void add_shares(const AllScores& own, float scale, int warp, float4 (&partial)[QK_WARPS][32], Scores& s,
                       bool warmup) {
    const int lane = threadIdx.x % 32, share = column_share(warp);
    const auto score = [&](int i) { return share == 0 ? own[1][i] : own[0][i]; };  // of the other's rows
    partial[warp][lane] = make_float4(score(0), score(1), score(2), score(3));
    if (!warmup) named_barrier_sync<COLUMN_SHARES * 32>(FIRST_SHARE_BARRIER + key_warp(warp));
    const float4 other = partial[(warp + KEY_WARPS) % QK_WARPS][lane];
    const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = ((share == 0 ? own[0][i] : own[1][i]) + others[i]) * scale;
}

// The first pass is a warm-up, while the first keys are in flight: it fetches from DRAM the code that the first tile
// would wait for, each warp a part of it. Its queries and keys are what memory for the merge holds, which nothing is
// sent to before the warm-up ends.
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
    RowMerge row_merge;
    ClusterTileIterator work_tiles(p);
    WorkTile work;
    work.rows = work.row_tile = work.q_begin = 0;
#pragma unroll 1
    for (bool warmup = true; warmup || work_tiles.next(work); warmup = false) {
        Queries q;
        if (!warmup) wait_barrier(shared.full[kv_state.index], kv_state.phase);
        if (!warmup || converts) {
            q.load(p, work, shared, warmup ? scratch : shared_address(shared.stages[kv_state.index]), warp);
            fence_async_proxy();  // orders the reads before the copy that reuses the stage, which PV warps release
        }
        if (!warmup) kv_state.advance();
        Rows rows;
#pragma unroll
        for (int i = 0; i < ROW_EIGHTS * 2; ++i) rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
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
                multiply_keys(keys + column_share(warp) * 32, q, all);
                add_shares(all, q.scale_of(0, 0), warp, shared.partial_scores, s, warmup);
                if (valid < TILE_TOKENS) mask_missing(valid, warp, s);
            }
            if (!warmup || publishes) {
                publish_check(s, rows, warp, shared.score_check[p_state.index], warmup);
                publish_probabilities(s, warp, p_state, shared, rows, warmup);
            }
            if (!warmup) kv_state.advance(STAGES_OF_TILE - half), p_state.advance();
        }
        publish_sums(rows, warp, sums_parity, shared, warmup);
        if (warp == 0) row_merge.next(p, work_tiles, work, shared, warmup);
        if (warmup) cluster_arrive_relaxed();  // the other CTAs may send to this one
    }
    row_merge.join();
}

}  // namespace paged_mla_decode
