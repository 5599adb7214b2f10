// Kernels with shared memory and barriers, compiled for the host: the threads of a block are fibers, which meet at each
// barrier; blocks run one after another.
//
// Build: -DSOURCE="kernel.cu" -DKERNEL_NAME=kernel and what the kernel itself takes; run() takes the parameter struct.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <memory>
#include <ucontext.h>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__
// Declared for what is never called.
size_t __cvta_generic_to_shared(const void*);
static float __uint_as_float(unsigned word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static float __fmul_rn(float a, float b) { return a * b; }

using std::max;
using std::min;

struct Signed {
    int x, y, z;
};
static Signed threadIdx, blockIdx, gridDim, blockDim;

static ucontext_t caller;
static std::vector<ucontext_t> threads;
static std::vector<bool> ended;

// Runs the other threads up to the same point. A warp's barrier holds up the whole block, which is correct where all
// warps pass equally many.
static void meet() { swapcontext(&threads[threadIdx.x], &caller); }
static void __syncthreads() { meet(); }
static void __syncwarp() { meet(); }
static int atomicOr(uint32_t* word, uint32_t bits) { return *word |= bits; }
// The value of another lane of the warp; all warps pass equally many of these, too.
template <class T>
static T __shfl_sync(unsigned, T value, int lane) {
    static T of_threads[1024];
    of_threads[threadIdx.x] = value;
    meet();
    const T found = of_threads[threadIdx.x / 32 * 32 + lane % 32];
    meet();
    return found;
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ lanes);
}
template <class T>
static T __ldcg(const T* from) {
    return *from;
}

#include "common/ptx.cuh"  // which has shared memory of its own, that no kernel here uses
#undef __shared__
#define __shared__ static
#include SOURCE

static const Params* parameters;

static void run_thread() {
    KERNEL_NAME(*parameters);
    ended[threadIdx.x] = true;
    for (;;) meet();
}

extern "C" void run(const Params* given, const int* grid, int count) {
    constexpr size_t STACK = 1 << 16;
    parameters = given;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {count, 1, 1};
    threads.resize(count);
    ended.resize(count);
    std::unique_ptr<char[]> stacks(new char[count * STACK]);
    for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x) {
        for (int i = 0; i < count; ++i) {
            ended[i] = false;
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = stacks.get() + i * STACK;
            threads[i].uc_stack.ss_size = STACK;
            makecontext(&threads[i], run_thread, 0);
        }
        while (!std::all_of(ended.begin(), ended.end(), [](bool done) { return done; }))
            for (threadIdx.x = 0; threadIdx.x < count; ++threadIdx.x)
                if (!ended[threadIdx.x]) swapcontext(&caller, &threads[threadIdx.x]);
    }
}
