// The arithmetic of common/segments.cuh compiled for the host, in the hands of a test.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

using std::max;
using std::min;

static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Declared for what is never called.
float __shfl_xor_sync(unsigned, float, int);
size_t __cvta_generic_to_shared(const void*);
float __uint_as_float(unsigned);

#define exp2_approximate exp2_of_the_device
#include SOURCE_PTX
#undef exp2_approximate
static float exp2_approximate(float x) { return exp2f(x); }
#include SOURCE

extern "C" float raised(float maximum, float top, float scale) { return segments::raised(maximum, top, scale); }

// Folds `count` segments of one output each; writes maximum, sum and output.
extern "C" void fold(const float* maxima, const float* sums, const float* outs, int count, float scale, float* to) {
    segments::Statistics row;
    float out = 0.f;
    for (int i = 0; i < count; ++i) {
        const segments::Fold by = segments::fold_maximum(row.maximum, maxima[i], scale);
        row.sum = by(row.sum, sums[i]);
        out = by(out, outs[i]);
    }
    to[0] = row.maximum, to[1] = row.sum, to[2] = out;
}

// Writes the factor and the log-sum-exp of a row.
extern "C" void normalise(float maximum, float sum, const float* sink, int lse_sink, float* to) {
    const segments::Normalisation n = segments::normalise({maximum, sum}, 1.f, sink, 3.f, lse_sink);
    to[0] = n.factor, to[1] = n.lse;
}
