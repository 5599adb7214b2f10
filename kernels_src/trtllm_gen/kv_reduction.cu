// Merges split-KV partials; runs after trtllm-gen kernels that leave their reduction to a separate kernel.
//
//   partial_out         [batch][head CTA][query tile][split][row][dim]       -+
//   partial_statistics  the same without dim: (maximum, sum)                 -+--> out [token][head][dim]
//                                                                             +--> softmax_statistics [token][head]
//
// blockIdx.x: query tile, and number of the CTA among those that share it; blockIdx.y: head CTA and part of the value
// dimension; blockIdx.z: request. A thread owns 8 neighbouring dims of one row and walks over the splits in index
// order, twice: first for the maximum, then to add. So the order of additions depends on the number of splits alone,
// and only partials that a CTA wrote are read.
//
// A partial's statistics stand for sum * 2^(scale * maximum), its output for the numerator. With 8-bit probabilities
// the sums include their quantisation factor and the outputs do not (sum_scale). A partial that saw no key has the
// maximum -inf or the lowest float; its output is not read. A row without keys and sink: output 0, statistics (-inf,
// 0).
//
// Build: -DPARTIAL_FP16=0|1 -DOUT_E4M3=0|1 -DKERNEL_NAME=symbol; a 2-byte output has the partials' type.

#include <cfloat>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../common/ptx.cuh"
#include "KernelConstants.h"
#include "KvReductionParams.h"

using Params = KvReductionParams;

namespace kv_reduction {

constexpr int THREADS = REDUCTION_THREADS;
constexpr int VALUES = REDUCTION_VALUES;
static_assert(VALUES * 2 == 16, "of a thread: one 16-byte load");
constexpr int SLICE_VALUES = THREADS * VALUES;
constexpr int SPLITS_IN_FLIGHT = 4;
constexpr float LOG2_E = 1.4426950408889634f;

#if PARTIAL_FP16
using Partial2 = __half2;
DEVICE float2 widen(Partial2 pair) { return __half22float2(pair); }
#else
using Partial2 = __nv_bfloat162;
DEVICE float2 widen(Partial2 pair) { return __bfloat1622float2(pair); }
#endif

// Which keys, and so which splits, the tile of one CTA has; `tokens` is 0 where the request has no such tile.
struct Tile {
    int first_token;  // on the axis of all query tokens
    int tokens;
    int splits;
};

DEVICE Tile find_tile(const Params& p, int request, int tile) {
    const int* cum_q = static_cast<const int*>(p.cum_seq_lens_q);
    const int q_start = cum_q ? cum_q[request] : request * p.max_q;
    const int q_len = cum_q ? cum_q[request + 1] - q_start : p.max_q;
    Tile found;
    found.first_token = q_start + tile * p.tokens_per_cta;
    found.tokens = max(0, min(q_len - tile * p.tokens_per_cta, p.tokens_per_cta));
    // The last token of the tile sees the most keys; it does not see draft tokens after it.
    const int last = tile * p.tokens_per_cta + found.tokens - 1;
    int keys = static_cast<const int*>(p.seq_lens)[request] - q_len + last + 1;
    if (p.top_k_lens && found.tokens)
        keys = static_cast<const int*>(p.top_k_lens)[found.first_token];
    else if (p.top_k > 0)
        keys = min(keys, p.top_k);
    keys = max(keys, 0);
    found.splits = min(keys / p.tile_kv + (keys % p.tile_kv != 0), p.ctas_kv);
    return found;
}

// The exponent (base 2) of a partial; -inf for one that saw no key, whatever the scale.
DEVICE float exponent_of(float maximum, float scale) { return maximum <= -FLT_MAX ? -INFINITY : maximum * scale; }

DEVICE void add_partial(float (&values)[VALUES], const uint4& partial, float weight) {
    const Partial2* pairs = reinterpret_cast<const Partial2*>(&partial);
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i) {
        const float2 pair = widen(pairs[i]);
        values[2 * i] += weight * pair.x;
        values[2 * i + 1] += weight * pair.y;
    }
}

DEVICE void store(void* out, int64_t offset, const float (&values)[VALUES]) {
#if OUT_E4M3
    uint2 packed;
    __nv_fp8x2_storage_t* pairs = reinterpret_cast<__nv_fp8x2_storage_t*>(&packed);
    for (int i = 0; i < VALUES / 2; ++i)
        pairs[i] = __nv_cvt_float2_to_fp8x2(make_float2(values[2 * i], values[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(out) + offset) = packed;
#else
    uint4 packed;
    Partial2* pairs = reinterpret_cast<Partial2*>(&packed);
    for (int i = 0; i < VALUES / 2; ++i) {
#if PARTIAL_FP16
        pairs[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
#else
        pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
#endif
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + offset) = packed;
#endif
}

// `partial` is the index of the row's first split, in rows of the partials.
DEVICE void merge_row(const Params& p, const Tile& tile, int64_t partial, int row, int dim, float scale) {
    const int head_cta = blockIdx.y / p.value_ctas;
    const int head = head_cta * p.heads_per_cta + row % p.heads_per_cta;
    const int64_t out_row = static_cast<int64_t>(tile.first_token + row / p.heads_per_cta) * p.heads_q + head;
    const float2* statistics = static_cast<const float2*>(p.partial_statistics) + partial;
    const uint16_t* partial_out = static_cast<const uint16_t*>(p.partial_out) + partial * p.head_dim + dim;

    const float sink = p.sinks ? static_cast<const float*>(p.sinks)[head] * LOG2_E : -INFINITY;
    float top = sink;
#pragma unroll SPLITS_IN_FLIGHT
    for (int split = 0; split < tile.splits; ++split)
        top = fmaxf(top, exponent_of(statistics[static_cast<int64_t>(split) * p.tile_q].x, scale));

    float total = sink == -INFINITY ? 0.f : p.sum_scale * exp2f(sink - top);
    float values[VALUES] = {};
    for (int base = 0; base < tile.splits; base += SPLITS_IN_FLIGHT) {
        float2 numbers[SPLITS_IN_FLIGHT];
        uint4 partials[SPLITS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < SPLITS_IN_FLIGHT; ++i) {  // all loads of a batch are in flight together
            const int64_t rows = static_cast<int64_t>(min(base + i, tile.splits - 1)) * p.tile_q;
            numbers[i] = statistics[rows];
            partials[i] = *reinterpret_cast<const uint4*>(partial_out + rows * p.head_dim);
        }
#pragma unroll
        for (int i = 0; i < SPLITS_IN_FLIGHT; ++i) {
            const float exponent = exponent_of(numbers[i].x, scale);
            if (base + i >= tile.splits || exponent == -INFINITY) continue;
            const float weight = exp2f(exponent - top);
            total += weight * numbers[i].y;
            add_partial(values, partials[i], weight);
        }
    }

    const bool is_empty = total == 0.f;  // not <=: a NaN from a visible key stays a NaN
    const float normalise = is_empty ? 0.f : p.sum_scale / total;
    for (int i = 0; i < VALUES; ++i) values[i] *= normalise;
    const int value_cta = blockIdx.y % p.value_ctas;
    store(p.out, out_row * p.head_dim_v + value_cta * p.head_dim + dim, values);
    if (p.softmax_statistics && value_cta == 0 && dim == 0)
        static_cast<float2*>(p.softmax_statistics)[out_row] =
            is_empty ? make_float2(-INFINITY, 0.f) : make_float2(top / LOG2_E, total / p.sum_scale);
}

}  // namespace kv_reduction

extern "C" __global__ void __launch_bounds__(kv_reduction::THREADS, 2) KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace kv_reduction;
    wait_for_previous_grid();
    const int request = blockIdx.z, tile_index = blockIdx.x % p.ctas_q, cta = blockIdx.x / p.ctas_q;
    const Tile tile = find_tile(p, request, tile_index);
    const int rows = tile.tokens * p.heads_per_cta;
    const int slice_rows = SLICE_VALUES / p.head_dim;
    const int own_row = threadIdx.x * VALUES / p.head_dim, dim = threadIdx.x * VALUES % p.head_dim;
    const float scale =
        p.device_softmax_scale_log2 ? *static_cast<const float*>(p.device_softmax_scale_log2) : p.softmax_scale_log2;
    const int64_t first_partial =
        ((static_cast<int64_t>(request) * gridDim.y + blockIdx.y) * p.ctas_q + tile_index) * p.ctas_kv * p.tile_q;
    for (int slice = cta * slice_rows; slice < rows; slice += p.ctas_per_tile * slice_rows) {
        const int row = slice + own_row;
        if (row < rows) merge_row(p, tile, first_partial + row, row, dim, scale);
    }
    allow_next_grid();
}
