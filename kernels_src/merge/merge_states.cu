// Merges partial attention results over disjoint sets of keys by their log-sum-exp.
//
//   v [tokens, parts, heads, dim], s [tokens, parts, heads]   -+
//   v_other [tokens, heads, dim], s_other [tokens, heads]     -+--> out [tokens, heads, dim], lse [tokens, heads]
//   sinks [heads], added once                                 -+
//
// Neighbouring lanes of a warp own a row, a token and a head, and each of them VALUES neighbouring dims at a time. The
// parts are added in their order, v_other last, with weights relative to the largest of all: the bits depend on the
// parts' order alone. A part with LSE -inf saw no key; its values do not count, whatever they are. All parts of an
// element are read before it is written, by the same lane, and the LSEs of a row before its own is written, so out and
// lse may be v and s of the same row.
//
// Build: -DVALUES_TYPE=0 bf16|1 fp16|2 fp32 -DKERNEL_NAME=symbol.

#include "../common/ptx.cuh"
#include "KernelConstants.h"
#include "MergeStatesParams.h"

using Params = MergeStatesParams;

namespace merge_states {

constexpr int THREADS = MERGE_THREADS;
constexpr int VALUES = MERGE_VALUES;
constexpr int PARTS_IN_FLIGHT = 2;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int BF16 = 0, FP16 = 1, FP32 = 2;
constexpr int ITEM_BYTES = VALUES_TYPE == FP32 ? 4 : 2;
constexpr int LOADS = VALUES * ITEM_BYTES / 16;

struct Part {
    const char* values;
    const float* lse;
};

DEVICE Part part_of(const Params& p, int index, int64_t token, int64_t head) {
    if (index < p.parts)
        return {static_cast<const char*>(p.v) +
                    (token * p.v_token_stride + index * p.v_part_stride + head * p.v_head_stride) * ITEM_BYTES,
                static_cast<const float*>(p.s) + token * p.s_token_stride + index * p.s_part_stride +
                    head * p.s_head_stride};
    return {static_cast<const char*>(p.v_other) +
                (token * p.v_other_token_stride + head * p.v_other_head_stride) * ITEM_BYTES,
            static_cast<const float*>(p.s_other) + token * p.s_other_token_stride + head * p.s_other_head_stride};
}

DEVICE void add_part(float (&sums)[VALUES], const uint4 (&data)[LOADS], float weight) {
#if VALUES_TYPE == 2
    const float* values = reinterpret_cast<const float*>(data);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sums[i] += weight * values[i];
#else
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(data);
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i) {
        const float2 pair = VALUES_TYPE == FP16 ? unpack_fp16(pairs[i]) : unpack_bf16(pairs[i]);
        sums[2 * i] += weight * pair.x;
        sums[2 * i + 1] += weight * pair.y;
    }
#endif
}

DEVICE void store(const Params& p, int64_t offset, const float (&values)[VALUES]) {
    if (p.out_type == FP32) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(p.out) + offset);
#pragma unroll
        for (int i = 0; i < VALUES / 4; ++i)
            to[i] = make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
        return;
    }
    uint32_t pairs[VALUES / 2];
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i)
        pairs[i] = p.out_type == FP16 ? pack_fp16(values[2 * i], values[2 * i + 1])
                                      : pack_bf16(values[2 * i], values[2 * i + 1]);
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + offset) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Writes the row's output; returns its log-sum-exp.
DEVICE float merge_row(const Params& p, int64_t token, int64_t head, int lane) {
    const int parts = p.parts + (p.v_other ? 1 : 0);
    const float sink = p.sinks ? static_cast<const float*>(p.sinks)[head] * LOG2_E : -INFINITY;
    float top = sink;
    for (int i = 0; i < parts; ++i) top = fmaxf(top, *part_of(p, i, token, head).lse * p.lse_to_log2);
    float total = sink == -INFINITY ? 0.f : exp2f(sink - top);
    for (int i = 0; i < parts; ++i) {
        const float exponent = *part_of(p, i, token, head).lse * p.lse_to_log2;
        if (exponent != -INFINITY) total += exp2f(exponent - top);
    }
    const bool is_empty = total == 0.f;  // not <=: a NaN of a part stays a NaN
    const float normalise = is_empty ? 0.f : 1.f / total;
    const int64_t out_row = token * p.out_token_stride + head * p.out_head_stride;
    for (int unit = lane; unit < p.units; unit += 1 << p.lanes_log2) {
        float sums[VALUES] = {};
        for (int base = 0; base < parts; base += PARTS_IN_FLIGHT) {
            uint4 data[PARTS_IN_FLIGHT][LOADS];
            float exponents[PARTS_IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < PARTS_IN_FLIGHT; ++i) {  // all loads of a batch are in flight together
                const Part part = part_of(p, min(base + i, parts - 1), token, head);
                exponents[i] = *part.lse * p.lse_to_log2;
                const uint4* from = reinterpret_cast<const uint4*>(part.values + unit * (VALUES * ITEM_BYTES));
#pragma unroll
                for (int j = 0; j < LOADS; ++j) data[i][j] = from[j];
            }
#pragma unroll
            for (int i = 0; i < PARTS_IN_FLIGHT; ++i)
                if (base + i < parts && exponents[i] != -INFINITY) add_part(sums, data[i], exp2f(exponents[i] - top));
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[i] *= normalise;
        store(p, out_row + unit * VALUES, sums);
    }
    return is_empty ? -INFINITY : (top + log2f(total)) * p.lse_from_log2;
}

}  // namespace merge_states

extern "C" __global__ void __launch_bounds__(merge_states::THREADS, MERGE_CTAS_PER_MULTIPROCESSOR)
    KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace merge_states;
    wait_for_previous_grid();
    allow_next_grid();  // its CTAs find room beside these, and wait for the end of this grid before they read
    const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
    const int64_t rows = static_cast<int64_t>(p.tokens) * p.heads, step = THREADS >> p.lanes_log2;
    // All lanes of a warp go round equally often.
    for (int64_t base = blockIdx.x * step; base < rows; base += gridDim.x * step) {
        const uint32_t row = static_cast<uint32_t>(base + (threadIdx.x >> p.lanes_log2));
        const uint32_t token = row / static_cast<uint32_t>(p.heads);
        const uint32_t head = row - token * static_cast<uint32_t>(p.heads);
        const bool is_wanted = row < rows && (!p.mask || static_cast<const uint8_t*>(p.mask)[token]);
        const float lse = is_wanted ? merge_row(p, token, head, lane) : 0.f;
        __syncwarp();  // all lanes of the row have read its LSEs, one of which may lie where its own goes
        if (is_wanted && lane == 0 && p.lse)
            static_cast<float*>(p.lse)[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
    }
}
