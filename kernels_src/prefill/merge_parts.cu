// Merges the outputs of split keys (SPLIT_KEYS of context_attention.cu) by their log-sum-exp.
//
//   parts [tokens, splits, heads, columns], fp32   -+
//   part_lses [tokens, splits, heads], fp32        -+--> out [tokens, heads, columns]
//   sinks [heads], added once                      -+    lse [tokens, heads]
//
// `1 << warps_log2` warps share a row, a token and a head: each adds every so many parts, whose loads are all in
// flight, and the first adds the warps' sums in order. A part whose log-sum-exp is -inf saw no key. Rows of tokens in
// front of the first request and behind the last one are left as they are.
//
// Build: -DTO_FP16=0|1 (else bf16) -DKERNEL_NAME=symbol
#include "../common/ptx.cuh"
#include "KernelConstants.h"
#include "MergePartsParams.h"

using Params = MergePartsParams;

namespace merge_parts {

constexpr int THREADS = MERGE_PARTS_THREADS, WARPS = THREADS / 32;
constexpr int LANE_COLUMNS = 4, WARP_COLUMNS = 32 * LANE_COLUMNS, MOST_COLUMNS = 256;
constexpr int MOST_SPLITS = MERGE_PARTS_MAX_SPLITS, WARP_SPLITS = MOST_SPLITS / WARPS;
constexpr float LOG2_E = 1.4426950408889634f;

struct Row {
    int64_t token;
    int head;
};

// What the parts of a row count: those of a lane, and what is divided by their sum.
struct Weights {
    float own[MOST_SPLITS / 32], factor, lse;

    DEVICE Weights(const Params& p, const Row& row) {
        const float* lses = static_cast<const float*>(p.part_lses) + row.token * p.splits * p.heads + row.head;
        const float sink = p.sinks ? static_cast<const float*>(p.sinks)[row.head] * LOG2_E : -INFINITY;
        float top = sink, total = 0.f;
#pragma unroll
        for (int i = 0; i < MOST_SPLITS / 32; ++i) {
            const int split = threadIdx.x % 32 + 32 * i;
            own[i] = split < p.splits ? __ldcg(lses + split * p.heads) : -INFINITY;
            top = fmaxf(top, own[i]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        const float anchor = top == -INFINITY ? 0.f : top;
#pragma unroll
        for (int i = 0; i < MOST_SPLITS / 32; ++i) total += own[i] = exp2f(own[i] - anchor);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        total += exp2f(sink - anchor);
        factor = total == 0.f ? 0.f : 1.f / total;  // not <=: a NaN of a part stays a NaN
        lse = (anchor + log2f(total)) * p.lse_scale;
    }

    DEVICE float of(int split) const {
        const float low = __shfl_sync(~0u, own[0], split % 32), high = __shfl_sync(~0u, own[1], split % 32);
        return split < 32 ? low : high;
    }
};

// The sum of a warp's parts of four columns; `first` is the warp among those of the row.
DEVICE float4 sum_of_parts(const Params& p, const Row& row, const Weights& weights, int first, int column) {
    const int64_t stride = static_cast<int64_t>(p.heads) * p.columns;
    const float* parts = static_cast<const float*>(p.parts) + row.token * p.splits * stride +
                         static_cast<int64_t>(row.head) * p.columns + column;
    float4 data[WARP_SPLITS], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < WARP_SPLITS; ++i) {
        const int split = first + (i << p.warps_log2);
        if (split < p.splits && column < p.columns)
            data[i] = __ldcg(reinterpret_cast<const float4*>(parts + split * stride));
    }
#pragma unroll
    for (int i = 0; i < WARP_SPLITS; ++i) {
        const int split = first + (i << p.warps_log2);
        if (split >= p.splits) break;  // of the whole warp
        const float weight = weights.of(split);
        if (weight != 0.f && column < p.columns) {
            sum.x = fmaf(weight, data[i].x, sum.x);
            sum.y = fmaf(weight, data[i].y, sum.y);
            sum.z = fmaf(weight, data[i].z, sum.z);
            sum.w = fmaf(weight, data[i].w, sum.w);
        }
    }
    return sum;
}

DEVICE bool is_of_a_request(const Params& p, int64_t token) {
    const int* sums = static_cast<const int*>(p.q_cu_seq_lens);
    return sums == nullptr || (token >= sums[0] && token < sums[p.batch]);
}

DEVICE uint32_t pack(float low, float high) { return TO_FP16 ? pack_fp16(low, high) : pack_bf16(low, high); }

}  // namespace merge_parts

extern "C" __global__ void __launch_bounds__(merge_parts::THREADS) KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace merge_parts;
    __shared__ float4 sums[WARPS][MOST_COLUMNS / LANE_COLUMNS];
    wait_for_previous_grid();
    allow_next_grid();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = 1 << p.warps_log2, own = warp % warps;
    const int index = blockIdx.x * (WARPS >> p.warps_log2) + (warp >> p.warps_log2);
    const Row row{index / p.heads, index % p.heads};
    const bool exists = row.token < p.tokens && is_of_a_request(p, row.token);
    float factor = 0.f;
    if (exists) {
        const Weights weights(p, row);
        factor = weights.factor;
        for (int column = lane * LANE_COLUMNS; column < MOST_COLUMNS; column += WARP_COLUMNS)
            sums[warp][column / LANE_COLUMNS] = sum_of_parts(p, row, weights, own, column);
        if (p.lse != nullptr && own == 0 && lane == 0)
            static_cast<float*>(p.lse)[row.token * p.lse_token_stride + row.head * p.lse_head_stride] = weights.lse;
    }
    __syncthreads();
    if (!exists || own != 0) return;
    uint16_t* out = static_cast<uint16_t*>(p.out) + row.token * p.out_token_stride + row.head * p.out_head_stride;
    for (int column = lane * LANE_COLUMNS; column < p.columns; column += WARP_COLUMNS) {
        float4 sum = sums[warp][column / LANE_COLUMNS];
        for (int other = 1; other < warps; ++other) {
            const float4 next = sums[warp + other][column / LANE_COLUMNS];
            sum = make_float4(sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w);
        }
        *reinterpret_cast<uint2*>(out + column) =
            make_uint2(pack(sum.x * factor, sum.y * factor), pack(sum.z * factor, sum.w * factor));
    }
}
