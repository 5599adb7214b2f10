// Queries of the sparse kernel for rows with scales: from stages of the pipeline to the B operand. PV warps, which have
// nothing else to do, convert those of the first output tile while QK warps fetch their code; QK warps convert the
// others.
#pragma once
#include "cluster_tiles.cuh"

namespace paged_mla_decode {

// Converts queries, of which each of WARPS warps has an equal share: latent columns to fp16 as convert_queries does,
// rope columns stay bf16. Rows that do not exist become zero.
template <int WARPS>
DEVICE void convert_scaled_queries(PipelineState<STAGES> state, int rows, SharedStorage& shared, int warp) {
    constexpr int OWN = ROWS / WARPS;
    const int lane = threadIdx.x % 32;
    uint32_t stage[QUERY_STAGES];
#pragma unroll
    for (int i = 0; i < QUERY_STAGES; ++i, state.advance()) {
        wait_barrier(shared.full[state.index], state.phase);
        stage[i] = shared_address(shared.stages[state.index]);
    }
    const auto store = [&](int row, int chunk, const uint4& value) {
        const uint32_t at =
            shared_address(shared.q) + chunk / 8 * QUERY_BOX_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
        store_shared_uint4(at, value);
    };
#pragma unroll 1
    for (int row = warp * OWN; row < (warp + 1) * OWN; ++row) {
        const uint32_t source = stage[QUERY_STAGES == 1 ? 0 : row / 16] + row % 16 * QUERY_PITCH;
        uint4 low = make_uint4(0, 0, 0, 0), high = low, rope = low;
        if (row < rows) {
            low = load_shared_uint4(source + lane * 32), high = load_shared_uint4(source + lane * 32 + 16);
            rope = load_shared_uint4(source + LATENT * 2 + lane % (ROPE / 8) * 16);
        }
        const uint32_t own[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        uint32_t largest = 0;  // magnitudes in both halves; those of bf16 are ordered like integers
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = __vmaxu2(largest, own[i] & 0x7fff7fff);
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        const int exponent = largest > 0 ? fp16_range_exponent(largest >> 7) : 0;
        const float factor = power_of_two(-exponent);
        uint32_t two[8];
        bf16_to_fp16_as_e4m3(own, factor, two);
        store(row, 2 * lane, make_uint4(two[0], two[1], two[2], two[3]));
        store(row, 2 * lane + 1, make_uint4(two[4], two[5], two[6], two[7]));
        if (lane < ROPE / 8) store(row, LATENT / 8 + lane, rope);
        if (lane == 0) shared.query_scale[row] = power_of_two(exponent);
    }
    fence_async_proxy();  // also orders the reads before the copies that reuse the stages, which PV warps release
}

// Of PV warps.
DEVICE void convert_first_queries(const ClusterTileIterator& work_tiles, const PipelineState<STAGES>& state,
                                  SharedStorage& shared, int warp) {
    convert_scaled_queries<CONSUMER_WARPS>(state, work_tiles.rows(), shared, warp);
    named_barrier_arrive<CONSUMERS + QK_WARPS * 32>(QUERIES_BARRIER);
}

// Of QK warps.
DEVICE void take_queries(bool first, const PipelineState<STAGES>& state, int rows, SharedStorage& shared, int warp) {
    if (first) {
        named_barrier_sync<CONSUMERS + QK_WARPS * 32>(QUERIES_BARRIER);
    } else {
        convert_scaled_queries<QK_WARPS>(state, rows, shared, warp);
        named_barrier_sync<QK_WARPS * 32>(QK_BARRIER);
    }
}

}  // namespace paged_mla_decode
