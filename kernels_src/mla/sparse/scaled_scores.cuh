// QK warpgroup of the sparse kernel in clusters for rows with scales: S^T = K Q^T of 16 keys per warp, keys in
// registers, converted to fp16, and queries in shared memory. Each block of 128 columns has sums of its own, which are
// multiplied by the keys' scales.
#pragma once
#include "../few_rows/queries.cuh"
#include "list_tiles.cuh"

namespace paged_mla_decode {

// Products are issued in groups.
constexpr int GROUP_STEPS = 4, GROUP_LOADS = GROUP_STEPS / 2;  // a load has two steps of e4m3, one of bf16
constexpr int BLOCK_GROUPS = LATENT / SCALE_BLOCKS / 16 / GROUP_STEPS, LATENT_GROUPS = SCALE_BLOCKS * BLOCK_GROUPS;
constexpr int ROPE_STEPS = ROPE / 16;
static_assert(SCALE_BLOCKS == 4, "the scales of a key are one load");
static_assert(ROPE_STEPS == 2 * GROUP_LOADS);

// Scores of 16 keys per warp. While a group's products are in flight, the keys of the next are converted, and before
// the first are, `meanwhile` is called. `row` is the address of the lane's key in the tile, as ldmatrix takes it;
// `scales` that of the scales of its scores' first key.
template <class Meanwhile>
DEVICE void multiply_scaled_keys(uint32_t row, uint32_t scales, const SharedStorage& shared, float scale_log2,
                                 Scores& s, Meanwhile meanwhile) {
    uint32_t raw[2][GROUP_LOADS][4], a[2][GROUP_STEPS][4];
    float sums[2][ROWS / 2];
    const uint32_t queries = queries_at(shared_address(shared.q));
    const auto operand = [&](int step) { return queries_operand(queries, step / 4 * QUERY_BOX_BYTES + step % 4 * 32); };
    const auto load = [&](int group) {  // those behind the latent ones are of rope columns
        const uint32_t at = group < LATENT_GROUPS ? row + group * GROUP_LOADS * 32
                                                  : row + ROPE_BYTE + (group - LATENT_GROUPS) * GROUP_LOADS * 32;
#pragma unroll
        for (int i = 0; i < GROUP_LOADS; ++i) ldmatrix_x4(raw[group % 2][i], at + i * 32);
    };
    load(0);
    const uint4 scale_bits[2] = {load_shared_uint4(scales), load_shared_uint4(scales + 8 * KEY_PITCH)};
    const auto add_sums = [&](int block) {
        fence_registers(sums[block % 2]);
        const auto bits = [&](const uint4& own) {
            return block == 0 ? own.x : block == 1 ? own.y : block == 2 ? own.z : own.w;
        };
        const float scale[2] = {__uint_as_float(bits(scale_bits[0])), __uint_as_float(bits(scale_bits[1]))};
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            float& to = s[i / 4][i % 4];
            to = block == 0 ? sums[0][i] * scale[i / 2 % 2] : __fmaf_rn(sums[block % 2][i], scale[i / 2 % 2], to);
        }
    };
#pragma unroll
    for (int group = 0; group < LATENT_GROUPS; ++group) {
        const int block = group / BLOCK_GROUPS;
        load(group + 1);
#pragma unroll
        for (int step = 0; step < GROUP_STEPS; ++step) {
            const uint32_t (&from)[4] = raw[group % 2][step / 2];
            uint32_t (&k)[4] = a[group % 2][step];
            e4m3_to_fp16(from[step % 2 * 2], k[0], k[2]);
            e4m3_to_fp16(from[step % 2 * 2 + 1], k[1], k[3]);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < GROUP_STEPS; ++step) {
            const uint64_t b = operand(group * GROUP_STEPS + step);
            if (group % BLOCK_GROUPS == 0 && step == 0)
                wgmma<true, false, false>(sums[block % 2], a[group % 2][step], b);
            else
                wgmma<true, false>(sums[block % 2], a[group % 2][step], b);
        }
        wgmma_commit();
        if (group == 0) {
            meanwhile();
            continue;
        }
        wgmma_wait<1>();
        if (group % BLOCK_GROUPS == 0) add_sums(block - 1);
    }
#pragma unroll
    for (int step = 0; step < ROPE_STEPS; ++step) {
        const int group = LATENT_GROUPS + step / GROUP_LOADS;
        if (step == 0) load(group + 1);
        if (step % GROUP_LOADS == 0) wgmma_fence();
        const uint32_t (&k)[4] = raw[group % 2][step % GROUP_LOADS];
        if (step == 0)
            wgmma<false, false, false>(sums[0], k, operand(LATENT / 16 + step));
        else
            wgmma<false, false>(sums[0], k, operand(LATENT / 16 + step));
    }
    wgmma_commit();
    wgmma_wait<1>();
    add_sums(SCALE_BLOCKS - 1);
    wgmma_wait<0>();
    fence_registers(sums[0]);
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
        const float row_scale = shared.query_scale[i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2];
        s[i / 4][i % 4] = (s[i / 4][i % 4] * row_scale + sums[0][i]) * scale_log2;
    }
}

// The scales of the lane's key, whose row begins at `key`, of two blocks; 0 if there is no such key.
DEVICE void load_scales(uint32_t key, bool exists, float (&scale)[2]) {
    const float2 two = load_shared_float2(key + SCALE_BYTE + scale_block() * 4);
    scale[0] = exists ? two.x : 0.f, scale[1] = exists ? two.y : 0.f;
}

DEVICE void score(const Params& p, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_QK_THREAD) / 32, 0);
    const int half = warp / (KEY_WARPS / STAGES_OF_TILE), first_key = warp * 16;
    const int stage_key = first_key % (TILE_TOKENS / STAGES_OF_TILE);
    const float scale_log2 = softmax_scale_log2(p);
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
        take_queries(first, kv_state, work.rows, shared, warp);
        kv_state.advance(QUERY_STAGES);
        Rows rows;
#pragma unroll
        for (int i = 0; i < ROW_EIGHTS * 2; ++i) rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
        for (int i = 0; i < 2; ++i) rows.unit[i] = power_of_two(-100);
#pragma unroll 1
        for (bool last = false; !last; p_state.advance()) {
            kv_state.advance(half);
            wait_barrier(shared.full[kv_state.index], kv_state.phase);
            const uint32_t tile = shared.tile[kv_state.index], stage = shared_address(shared.stages[kv_state.index]);
            last = tile & LAST_TILE;
            const int valid = tile & ~LAST_TILE;
            load_scales(stage + stage_offset(0, stage_key + lane / 2), first_key + lane / 2 < valid, rows.scale);
            Scores s;
            multiply_scaled_keys(stage + stage_offset(lane / 16 * 16, stage_key + lane % 16),
                                 stage + stage_offset(SCALE_BYTE, stage_key + lane / 4), shared, scale_log2, s,
                                 [&] { wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1); });
            publish_scores(s, valid, warp, p_state, shared, rows);
            kv_state.advance(STAGES_OF_TILE - half);
        }
        publish_sums(rows, warp, sums_parity, shared);
        if (warp == 0) row_merge.next(p, work_tiles, work, shared);
    }
    row_merge.join();
}

}  // namespace paged_mla_decode
