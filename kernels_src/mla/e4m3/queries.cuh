// bf16 queries of a work tile, converted to fp16 in shared memory.
#pragma once
#include "shared_storage.cuh"
#include "../softmax.cuh"
#if SPARSE
#include "../sparse/token_queries.cuh"
#else
#include "../query_rows.cuh"
#endif

namespace paged_mla_decode {

constexpr int STEPS = COLUMNS / 16;  // of a product
constexpr int QK_BARRIER = 2;

// Copies those rows of a work tile's queries that the warp converts.
DEVICE void copy_queries(const Params& p, const WorkTile& work, SharedStorage& shared, uint32_t thread) {
#if SPARSE
    copy_rows_of_token(p, work, shared_address(shared.q[0]), thread);
#else
    copy_query_rows<WARPGROUP / 4>(p, work, shared_address(shared.q[0]), thread / 32 * 8, false);
#endif
    cp_async_wait_all();
    __syncwarp();
}

// Converts the queries to fp16 in place, in the order of the bytes of keys (bf16_to_fp16_as_e4m3). A row is divided by
// the power of two that brings its largest magnitude below 2; its scores are multiplied with it. The row also takes the
// sign of the softmax scale.
DEVICE void load_queries(const Params& p, const WorkTile& work, SharedStorage& shared,
                         [[maybe_unused]] uint32_t slot = 0) {
    constexpr int GROUPS = KEY_BOXES;  // of 16 columns, of a lane
    constexpr int CONVERTED = SCALED ? GROUPS - 1 : GROUPS;  // rope columns stay bf16 beside scaled latent ones
    const float scale = softmax_scale_log2(p);
    const uint32_t thread = reread_thread_index() % WARPGROUP, quarter = thread % 4;
    named_barrier_sync<WARPGROUP>(QK_BARRIER);  // no warp multiplies the previous work tile's queries any more
    copy_queries(p, work, shared, thread);
#pragma unroll 1
    for (int row = thread / 4; row < ROWS; row += WARPGROUP / 4) {
        const uint32_t address = shared_address(shared.q[0]) + row * 128 + ((quarter * 2) ^ (row % 8)) * 16;
        uint32_t largest = 0;  // magnitudes in both halves; those of bf16 are ordered like integers
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i) {
            const uint4 v = load_shared_uint4((address ^ i % 2 * 16) + i / 2 * BOX_BYTES);
            largest = __vmaxu2(largest, __vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff));
            largest = __vmaxu2(largest, __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
        }
        largest = max(largest & 0xffff, largest >> 16);
        for (int step = 1; step < 4; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
        const int exponent = largest > 0 ? fp16_range_exponent(largest >> 7) : 0;
        const float factor = copysignf(power_of_two(-exponent), scale);
#pragma unroll 3
        for (int i = 0; i < CONVERTED; ++i) {
            const uint4 low = load_shared_uint4(address + i * BOX_BYTES),
                        high = load_shared_uint4((address ^ 16) + i * BOX_BYTES);
            const uint32_t raw[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            uint32_t two[8];
            bf16_to_fp16_as_e4m3(raw, factor, two);
            store_shared_uint4(address + i * BOX_BYTES, make_uint4(two[0], two[1], two[2], two[3]));
            store_shared_uint4((address ^ 16) + i * BOX_BYTES, make_uint4(two[4], two[5], two[6], two[7]));
        }
#if SPARSE
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at = (address ^ i * 16) + ROPE_BOX * BOX_BYTES, two = pack_bf16(factor, factor);
            const uint4 v = load_shared_uint4(at);
            store_shared_uint4(at, make_uint4(multiply_bf16(v.x, two), multiply_bf16(v.y, two), multiply_bf16(v.z, two),
                                              multiply_bf16(v.w, two)));
        }
#endif
        if (quarter == 0) {
            const float row_scale = fmaxf(power_of_two(exponent) * fabsf(scale), 1e-37f);  // 0 x -inf is NaN
#if SPARSE
            RowPair& pair = shared.rows[row / 2];
            pair.scale[row % 2] = row_scale, pair.maximum[row % 2] = LOWEST;
#else
            shared.scale[slot][row] = row_scale;
#endif
        }
    }
    fence_async_proxy();
    named_barrier_sync<WARPGROUP>(QK_BARRIER);
}

}  // namespace paged_mla_decode
