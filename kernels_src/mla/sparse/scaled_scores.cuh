// QK warpgroup of the sparse kernel in clusters for rows with scales: S^T = K Q^T of 16 keys per warp, keys in
// registers, converted to fp16, and queries in shared memory. Each block of 128 columns has sums of its own, which are
// multiplied by the keys' scales.
#pragma once
#include "list_tiles.cuh"

namespace paged_mla_decode {

constexpr int BLOCK_LOADS = LATENT / 32 / SCALE_BLOCKS, BLOCK_STEPS = 2 * BLOCK_LOADS, ROPE_STEPS = ROPE / 16;
static_assert(SCALE_BLOCKS == 4, "the scales of a key are one load");

// Copies a quarter of the queries per warp to shared memory as the B operand, and converts their latent columns to fp16
// as convert_queries does; rope columns stay bf16. Rows that do not exist become zero.
DEVICE void load_scaled_queries(const Params& p, const WorkTile& work, SharedStorage& shared, int warp) {
    constexpr int OWN = ROWS / QK_WARPS, CHUNKS = COLUMNS / 8;
    const int lane = threadIdx.x % 32;
    const auto address = [&](int row, int chunk) {
        return shared_address(shared.q) + chunk / 8 * QUERY_BOX_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
    };
#pragma unroll 4
    for (int row = warp * OWN; row < (warp + 1) * OWN; ++row) {
        const bool exists = row < work.rows;
        const uint16_t* const source =
            static_cast<const uint16_t*>(p.q) +
            row_offset(work, exists ? row : 0, p.heads, p.q_token_stride, p.q_head_stride);
#pragma unroll
        for (int chunk = lane; chunk < CHUNKS; chunk += 32)
            cp_async_16_zero_fill(address(row, chunk), source + chunk * 8, exists ? 16 : 0);
    }
    cp_async_wait_all();
    __syncwarp();
#pragma unroll 1
    for (int row = warp * OWN; row < (warp + 1) * OWN; ++row) {
        const uint4 low = load_shared_uint4(address(row, 2 * lane));
        const uint4 high = load_shared_uint4(address(row, 2 * lane + 1));
        const uint32_t own[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        uint32_t largest = 0;  // magnitudes in both halves; those of bf16 are ordered like integers
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = __vmaxu2(largest, own[i] & 0x7fff7fff);
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        const int exponent = largest > 0 ? fp16_range_exponent(largest >> 7) : 0;
        const float factor = power_of_two(-exponent);
        uint32_t two[8];
        bf16_to_fp16_as_e4m3(own, factor, two);
        store_shared_uint4(address(row, 2 * lane), make_uint4(two[0], two[1], two[2], two[3]));
        store_shared_uint4(address(row, 2 * lane + 1), make_uint4(two[4], two[5], two[6], two[7]));
        if (lane == 0) shared.query_scale[row] = power_of_two(exponent);
    }
    fence_async_proxy();
    named_barrier_sync<QK_WARPS * 32>(QK_BARRIER);
}

// `row` is the address of the lane's key in the tile, as ldmatrix takes it; `scales` that of the scales of its scores'
// first key.
DEVICE void multiply_scaled_keys(uint32_t row, uint32_t scales, const SharedStorage& shared, float scale_log2,
                                 Scores& s) {
    uint32_t raw[2][BLOCK_LOADS][4], a[2][BLOCK_STEPS][4];
    float sums[2][ROWS / 2];
    const uint64_t queries = k_major_descriptor(warp_uniform(shared_address(shared.q)));
    const auto operand = [&](int step) {
        return advance_descriptor(queries, step / 4 * QUERY_BOX_BYTES + step % 4 * 32);
    };
    const auto load = [&](int block) {  // that behind the latent ones: the rope columns
#pragma unroll
        for (int i = 0; i < BLOCK_LOADS; ++i)
            ldmatrix_x4(raw[block % 2][i], row + (block < SCALE_BLOCKS ? block * 128 : ROPE_BYTE) + i * 32);
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
    for (int block = 0; block < SCALE_BLOCKS; ++block) {
        load(block + 1);
#pragma unroll
        for (int step = 0; step < BLOCK_STEPS; ++step) {
            const uint32_t(&from)[4] = raw[block % 2][step / 2];
            uint32_t(&k)[4] = a[block % 2][step];
            e4m3_to_fp16(from[step % 2 * 2], k[0], k[2]);
            e4m3_to_fp16(from[step % 2 * 2 + 1], k[1], k[3]);
        }
        wgmma_fence();
        wgmma<true, false, false>(sums[block % 2], a[block % 2][0], operand(block * BLOCK_STEPS));
#pragma unroll
        for (int step = 1; step < BLOCK_STEPS; ++step)
            wgmma<true, false>(sums[block % 2], a[block % 2][step], operand(block * BLOCK_STEPS + step));
        wgmma_commit();
        if (block == 0) continue;
        wgmma_wait<1>();
        add_sums(block - 1);
    }
    static_assert(ROPE_STEPS == BLOCK_LOADS && SCALE_BLOCKS % 2 == 0, "rope columns are loaded as a block");
    wgmma_fence();
    wgmma<false, false, false>(sums[0], raw[0][0], operand(LATENT / 16));
#pragma unroll
    for (int step = 1; step < ROPE_STEPS; ++step)
        wgmma<false, false>(sums[0], raw[0][step], operand(LATENT / 16 + step));
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
    float2 two;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(two.x), "=f"(two.y)
                 : "r"(key + SCALE_BYTE + scale_block() * 4)
                 : "memory");
    scale[0] = exists ? two.x : 0.f, scale[1] = exists ? two.y : 0.f;
}

// The first tile of all is preceded by a warm-up, while the first keys are in flight: it fetches from DRAM the code that
// the tile would wait for. Its keys are what memory for the merge holds, which nothing is sent to before the warm-up
// ends.
DEVICE void score(const Params& p, SharedStorage& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_QK_THREAD) / 32, 0);
    const int half = warp / (KEY_WARPS / STAGES_OF_TILE), first_key = warp * 16;
    const int stage_key = first_key % (TILE_TOKENS / STAGES_OF_TILE);
    const uint32_t scratch = shared_address(&shared.merge);
    static_assert(sizeof(shared.merge) >= 16 * KEY_PITCH);
    const float scale_log2 = softmax_scale_log2(p);
    PipelineState<STAGES> kv_state;
    PipelineState<P_STAGES> p_state;
    uint32_t sums_parity = 0;
    bool warmup = true;
    ClusterTileIterator work_tiles(p);
    WorkTile work;
    while (work_tiles.next(work)) {
        if (work_tiles.begins_output_tile()) load_scaled_queries(p, work, shared, warp);
        Rows rows;
#pragma unroll 1
        for (bool last = false, first = true; !last; first = warmup, warmup = false) {
            if (first) {
#pragma unroll
                for (int i = 0; i < ROW_EIGHTS * 2; ++i)
                    rows.maximum[i / 2][i % 2] = LOWEST, rows.sum[i / 2][i % 2] = 0.f;
                for (int i = 0; i < 2; ++i) rows.unit[i] = power_of_two(-100);
            }
            uint32_t tile = 0;
            if (!warmup) {
                kv_state.advance(half);
                wait_barrier(shared.full[kv_state.index], kv_state.phase);
                tile = shared.tile[kv_state.index];
            }
            last = tile & LAST_TILE;
            const int valid = tile & ~LAST_TILE;
            const uint32_t stage = (warmup ? scratch : shared_address(shared.stages[kv_state.index])) -
                                   (warmup ? stage_key * KEY_PITCH : 0);
            Scores s;
            load_scales(stage + stage_offset(0, stage_key + lane / 2), first_key + lane / 2 < valid, rows.scale);
            multiply_scaled_keys(stage + stage_offset(lane / 16 * 16, stage_key + lane % 16),
                                 stage + stage_offset(SCALE_BYTE, stage_key + lane / 4), shared, scale_log2, s);
            if (valid < TILE_TOKENS) mask_missing(valid, warp, s);
            publish_check(s, rows, warp, shared.score_check[p_state.index], warmup);
            publish_probabilities(s, warp, p_state, shared, rows, warmup);
            if (!warmup) kv_state.advance(STAGES_OF_TILE - half), p_state.advance();
            if (!last && !warmup) continue;
            publish_sums(rows, warp, sums_parity, shared, warmup);
        }
    }
}

}  // namespace paged_mla_decode
