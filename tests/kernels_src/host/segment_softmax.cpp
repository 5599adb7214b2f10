// The softmax of batch-invariant prefill (and decode of many rows), and that of decode of few rows, compiled for the
// host: threads are fibers, which meet at each barrier and exchange.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <functional>
#include <memory>
#include <ucontext.h>

using std::max;
using std::min;

constexpr int THREADS_RUN = 128;
struct Signed {
    int x, y, z;
};
static Signed threadIdx, blockIdx, gridDim;
static ucontext_t caller, fibers[THREADS_RUN];
static float sent[THREADS_RUN];

static void meet() { swapcontext(&fibers[threadIdx.x], &caller); }
static void __syncwarp() {}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __shfl_xor_sync(unsigned, float value, int step) {
    sent[threadIdx.x] = value;
    meet();
    const float got = sent[threadIdx.x ^ step];
    meet();
    return got;
}
static size_t __cvta_generic_to_shared(const void*) { return 0; }
// Declared for what is never called.
int __shfl_sync(unsigned, int, int);
int __shfl_up_sync(unsigned, int, int);
unsigned __ballot_sync(unsigned, int);
unsigned __reduce_max_sync(unsigned, unsigned);
int __any_sync(unsigned, int);
int __clz(int);
int __ffs(int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
int __popc(unsigned);
int __popcll(unsigned long long);
float __fdividef(float, float);
float __uint_as_float(unsigned);
float __int_as_float(int);
unsigned __float_as_uint(float);
int atomicOr(unsigned*, unsigned);
template <class T>
T __ldcg(const T*);

#define __CUDA_ARCH__ 900  // for declarations; nothing of it is called
#define exp2_approximate exp2_of_the_device
#define pack_bf16 pack_bf16_of_the_device
#define pack_fp16 pack_fp16_of_the_device
#include SOURCE_PTX
#undef exp2_approximate
#undef pack_bf16
#undef pack_fp16
static float exp2_approximate(float x) { return exp2f(x); }
static uint32_t pack_bf16(float, float) { return 0; }
static uint32_t pack_fp16(float, float) { return 0; }
#define stmatrix_x4_trans stmatrix_of_the_device
#include SOURCE_WGMMA
#undef stmatrix_x4_trans
static void stmatrix_x4_trans(uint32_t, const uint32_t (&)[4]) {}
#include SOURCE

static std::function<void()> body;
static bool ended[THREADS_RUN];
static void run_fiber() {
    body();
    ended[threadIdx.x] = true;
    for (;;) meet();
}

static void run_block(int count, const std::function<void()>& of_thread) {
    constexpr size_t STACK = 1 << 16;
    static std::unique_ptr<char[]> stacks(new char[THREADS_RUN * STACK]);
    body = of_thread;
    for (int i = 0; i < count; ++i) {
        ended[i] = false;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks.get() + i * STACK;
        fibers[i].uc_stack.ss_size = STACK;
        makecontext(&fibers[i], run_fiber, 0);
    }
    while (!std::all_of(ended, ended + count, [](bool done) { return done; }))
        for (threadIdx.x = 0; threadIdx.x < count; ++threadIdx.x) swapcontext(&caller, &fibers[threadIdx.x]);
}

constexpr int KEYS = 128;

// Rows' scores of a segment, [tiles][rows][128], become probabilities; `factors` are [tiles][rows], `statistics`
// [rows][2]: maximum and sum. For 16 rows.
extern "C" void of_prefill(float* scores, int tiles, float scale, float* factors, float* statistics) {
    run_block(32, [=] {
        const int lane = threadIdx.x;
        float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {}, factor[2], s[KEYS / 2];
        for (int tile = 0; tile < tiles; ++tile) {
            const auto cell = [&](int i) -> float& {
                return scores[(tile * 16 + lane / 4 + i / 2 % 2 * 8) * KEYS + i / 4 * 8 + lane % 4 * 2 + i % 2];
            };
            for (int i = 0; i < KEYS / 2; ++i) s[i] = cell(i);
            segments::exponentiate(s, scale, maximum, sum, factor);
            for (int i = 0; i < KEYS / 2; ++i) cell(i) = s[i];
            for (int i = 0; i < 2; ++i) factors[tile * 16 + lane / 4 + 8 * i] = factor[i];
        }
        for (int i = 0; i < 2; ++i) {
            const float total = segments::segment_sum(sum[i]);
            statistics[2 * (lane / 4 + 8 * i)] = maximum[i];
            statistics[2 * (lane / 4 + 8 * i) + 1] = total;
        }
    });
}

// The same by a team of four warps, for ROWS rows.
extern "C" void of_decode(float* scores, int tiles, float scale, float* factors, float* statistics) {
    using namespace paged_decode;
    static Exchange exchange;
    run_block(TEAM, [=] {
        const int lane = threadIdx.x % 32;
        RowValues maximum, factor;
        for (auto& row : maximum) row[0] = row[1] = -INFINITY;
        RowSums sums;
        for (int tile = 0; tile < tiles; ++tile) {
            Scores s;
            const auto for_cells = [&](auto visit) {
                for (int b = 0; b < BLOCKS; ++b)
                    for (int n = 0; n < ROW_TILES; ++n)
                        for (int i = 0; i < 4; ++i)
                            visit(s[b][n][i], scores[(tile * ROWS + row_of_value(n, i % 2)) * KEYS +
                                                     warp_of_team() * WARP_TOKENS + b * 16 + i / 2 * 8 + lane / 4]);
            };
            for_cells([](float& own, float& given) { own = given; });
            tell_maxima(s, exchange.top[tile % 2][warp_of_team()]);
            meet();
            tell_probabilities(s, scale, tile % 2, exchange, maximum, factor);
            meet();
            for_cells([](float& own, float& given) { given = own; });
            if (RowSums::has_row()) sums.add(exchange, tile % 2);
            for (int n = 0; n < ROW_TILES; ++n)
                for (int i = 0; i < 2; ++i) factors[tile * ROWS + row_of_value(n, i)] = factor[n][i];
        }
        if (!RowSums::has_row()) return;
        const Statistics all = sums.close(exchange, (tiles - 1) % 2);
        statistics[2 * RowSums::row()] = all.maximum;
        statistics[2 * RowSums::row() + 1] = all.sum;
    });
}
