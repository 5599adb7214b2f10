// Kernels without shared memory and barriers, compiled for the host: one call runs a whole grid, thread by thread.
//
// Build: -DSOURCE="kernel.cu" -DKERNEL_NAME=kernel and what the kernel itself takes; run() takes the parameter struct.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__

// Declared for what is never called.
size_t __cvta_generic_to_shared(const void*);
float __uint_as_float(unsigned);

using std::max;
using std::min;

struct Signed {
    int x, y, z;
};
static Signed threadIdx, blockIdx, gridDim, blockDim;

#include SOURCE

extern "C" void run(const Params* parameters, const int* grid, int threads) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
                for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) KERNEL_NAME(*parameters);
}
