// Rows of the output and their log-sum-exp.
#pragma once
#include "softmax.cuh"

namespace context_attention {

using Output = float[VALUE_DIM / 2];

// Where a row of a row tile lies.
struct RowAddress {
    int token, head;
    DEVICE RowAddress(const Params& p, const WorkTile& work, int row)
        : token(work.token + (row >> p.packed_log2)), head(work.head + (row & ((1 << p.packed_log2) - 1))) {}
};

// Normalises the rows and writes their log-sum-exp; a row that sees no key has output 0.
DEVICE void finish_rows(const Params& p, const WorkTile& work, int row, float scale_log2, const Rows& rows,
                        Output& out) {
    float output_scale = p.output_scale;
    if (p.output_scale_device != nullptr) output_scale *= *static_cast<const float*>(p.output_scale_device);
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float total = rows.sum[i];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const RowAddress at(p, work, row + 8 * i);
        const bool exists = at.token < work.q_len, sees = rows.maximum[i] > -INFINITY;
        const float top = rows.maximum[i] * scale_log2;
        float lse = top + log2f(total);  // -inf for a row that sees no key
        factor[i] = 1.f / total;
        if (p.sinks != nullptr && exists) {
            const float sink = static_cast<const float*>(p.sinks)[at.head] * 1.44269504f;
            const float highest = fmaxf(top, sink), anchor = highest == -INFINITY ? 0.f : highest;
            const float scale = exp2f(top - anchor);
            const float with_sink = fmaf(total, scale, exp2f(sink - anchor));
            factor[i] = scale / with_sink;
            if (p.lse_sink) lse = highest + log2f(with_sink);
        }
        factor[i] = sees ? factor[i] * output_scale : 0.f;
        if (p.lse != nullptr && exists && threadIdx.x % 4 == 0)
            static_cast<float*>(p.lse)[(work.q_begin + at.token) * p.lse_token_stride + at.head * p.lse_head_stride] =
                lse * p.lse_scale;
    }
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) out[i] *= factor[i / 2 % 2];
}

// Writes the warp's 16 rows through its part of shared memory, in pieces of 16 bytes. `row` is the warp's first.
DEVICE void store_rows(const Params& p, SharedStorage& shared, const WorkTile& work, int row, const Output& out) {
    constexpr int PIECES = VALUE_DIM / 8;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t staging = OUT_REPLACES_QUERIES
                                 ? shared_address(shared.q[warp / 4]) + warp % 4 * OUT_WARP_BYTES
                                 : shared_address(shared.out[OUT_REPLACES_QUERIES ? 0 : warp]);
    __syncwarp();  // the rows of the last work tile have been read
#pragma unroll
    for (int j = 0; j < PIECES; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = out[4 * j + 2 * i], high = out[4 * j + 2 * i + 1];
            r[i] = MMA_FP16 ? pack_fp16(low, high) : pack_bf16(low, high);
        }
        const int to = lane % 16, piece = j + lane / 16;
        stmatrix_x4(staging + (to * PIECES + (piece ^ (to % 8))) * 16, r);
    }
    __syncwarp();
    uint16_t* base = static_cast<uint16_t*>(p.out);
#pragma unroll
    for (int i = 0; i < 16 * PIECES / 32; ++i) {
        const int cell = i * 32 + lane, from = cell / PIECES, piece = cell % PIECES;
        const RowAddress at(p, work, row + from);
        if (at.token < work.q_len) {
            const int64_t element = (work.q_begin + at.token) * p.out_token_stride + at.head * p.out_head_stride;
            *reinterpret_cast<uint4*>(base + element + piece * 8) =
                load_shared_uint4(staging + (from * PIECES + (piece ^ (from % 8))) * 16);
        }
    }
}

}  // namespace context_attention
