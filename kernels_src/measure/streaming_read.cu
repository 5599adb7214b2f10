// Read-only bandwidth test: the upper bound for a kernel that must read as many bytes.
//
//   data [units] of 16 bytes --> sum of 32-bit words per CTA (modulo 2^32) --> sums [CTAs]
//
// The CTAs walk over the data in step, a chunk of THREADS * LOADS units each, with several loads of each thread in
// flight. Every word is read once, so loads bypass L1. The sums keep the compiler from
// dropping loads; addition modulo 2^32 is associative, so their total does not depend on the grid.
//
// Build: -DL2_POLICY=word (an L2Policy) -DKERNEL_NAME=symbol.

#include "../common/ptx.cuh"
#include "KernelConstants.h"
#include "StreamingReadParams.h"

using Params = StreamingReadParams;

namespace streaming_read {

constexpr int THREADS = STREAMING_THREADS;
constexpr int LOADS = STREAMING_LOADS;  // of 16 bytes, in each thread
constexpr int WARPS = THREADS / 32;
constexpr int CHUNK = THREADS * LOADS;

DEVICE uint4 load(const uint4* unit, uint64_t policy) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(unit), "l"(policy));
    return words;
}

DEVICE uint32_t sum_of(const uint4& words) { return (words.x + words.y) + (words.z + words.w); }

}  // namespace streaming_read

extern "C" __global__ void __launch_bounds__(streaming_read::THREADS) KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace streaming_read;
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    const uint4* data = static_cast<const uint4*>(p.data);
    const int64_t chunks = p.units / CHUNK;
    uint32_t sum = 0;
    for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const uint4* first = data + chunk * CHUNK + threadIdx.x;
        uint4 words[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) words[i] = load(first + i * THREADS, policy);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) sum += sum_of(words[i]);
    }
    // The rest is less than a chunk; the next CTA in order reads it.
    if (blockIdx.x == chunks % gridDim.x)
        for (int64_t unit = chunks * CHUNK + threadIdx.x; unit < p.units; unit += THREADS)
            sum += sum_of(load(data + unit, policy));

    __shared__ uint32_t of_warps[WARPS];
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();  // all warps have stored their sums
    if (threadIdx.x >= 32) return;
    sum = __reduce_add_sync(0xffffffffu, threadIdx.x < WARPS ? of_warps[threadIdx.x] : 0);
    if (threadIdx.x == 0) static_cast<uint32_t*>(p.sums)[blockIdx.x] = sum;
}
