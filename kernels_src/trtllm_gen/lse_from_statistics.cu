// Softmax statistics to log-sum-exp, base 2; runs after a trtllm-gen kernel or its reduction.
//
//   statistics [token][head] (maximum in natural exponents, sum)  -->  lse[token * token_stride + head * head_stride]
//
// One thread per row. A row that saw no key has the sum 0 and gets -inf, whatever its maximum.
//
// Build: -DKERNEL_NAME=symbol

#include <cuda_runtime.h>

#include "../common/ptx.cuh"
#include "KernelConstants.h"
#include "LseFromStatisticsParams.h"

using Params = LseFromStatisticsParams;

namespace lse_from_statistics {

constexpr float LOG2_E = 1.4426950408889634f;

}  // namespace lse_from_statistics

extern "C" __global__ void __launch_bounds__(LSE_THREADS) KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace lse_from_statistics;
    wait_for_previous_grid();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < p.rows) {
        const float2 numbers = static_cast<const float2*>(p.statistics)[row];
        const float lse = numbers.y == 0.f ? -INFINITY : LOG2_E * numbers.x + log2f(numbers.y);
        static_cast<float*>(p.lse)[row / p.heads_q * p.token_stride + row % p.heads_q * p.head_stride] = lse;
    }
    allow_next_grid();
}
