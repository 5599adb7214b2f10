// Warpgroup matrix multiplication (WGMMA, sm_90a) and the copies that feed it.
#pragma once
#include "ptx.cuh"

// ---- shared-memory matrix descriptors: tiles of 128-byte rows as TMA writes them (128-byte swizzle) ----

// K-major operand: each row of ROW_BYTES (128, or 64 with the 64-byte swizzle) is one index of M or N; a K step is 32
// bytes of it.
template <int ROW_BYTES = 128>
DEVICE uint64_t k_major_descriptor(uint32_t address) {
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 64, "a swizzle of as many bytes");
    return uint64_t{ROW_BYTES == 128 ? 1 : 2} << 62 | uint64_t{8 * ROW_BYTES >> 4} << 32 | uint64_t{1} << 16 |
           (address & 0x3ffff) >> 4;
}

// MN-major operand: each row is one index of K and holds 64 of M or N; the next 64 lie `box_bytes` further. A K step of
// 16 is 2048 bytes.
DEVICE uint64_t mn_major_descriptor(uint32_t address, uint32_t box_bytes) {
    return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{box_bytes >> 4} << 16 | (address & 0x3ffff) >> 4;
}

// The address is in the low 32 bits and never carries out of them. A 64-bit addition would take longer than a product.
DEVICE uint64_t advance_descriptor(uint64_t operand, uint32_t bytes) {
    return (operand & 0xffffffff00000000) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

// ---- ordering ----

// Orders ordinary writes of accumulator and operand registers before the products that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// A compiler fence: uses of these registers may not move across it.
template <int N>
DEVICE void fence_registers(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Waits until at most PENDING of the latest groups are in flight.
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Orders this thread's writes to shared memory before later products and TMA copies of other threads, given a barrier.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT>
DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- copies ----

DEVICE void tma_load_3d(uint32_t destination, const void* map, uint32_t barrier, int c0, int c1, int c2,
                        uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
        : "memory");
}

// Elects one thread of a full warp in a way that the compiler recognises, so that TMA operands need no loop over
// threads.
DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}

// Copies the first `size` of 16 bytes and fills the rest with zeros.
DEVICE void cp_async_16_zero_fill(uint32_t destination, const void* source, int size) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(size)
                 : "memory");
}

DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- barriers ----

template <int THREADS>
DEVICE void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

DEVICE uint32_t atomic_add_relaxed(uint32_t* counter, uint32_t value) {
    uint32_t before;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

DEVICE uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// ---- products of 64 rows, fp16 or bf16 in, fp32 out ----

// Warp w of the warpgroup has rows 16 w on; a thread has rows lane / 4 and lane / 4 + 8 of them: d[4 j + i] is column
// 8 j + 2 (lane % 4) + i % 2, row + i / 2 * 8.

// The accumulator registers as text in the instruction, and as operands.
#define WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 \
    WGMMA_NAMES_16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                                 \
    WGMMA_NAMES_32                                                                     \
    ", "                                                                               \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_CELLS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_CELLS_8(d, i) WGMMA_CELLS_4(d, i), WGMMA_CELLS_4(d, i + 4)
#define WGMMA_CELLS_16(d, i) \
    WGMMA_CELLS_4(d, i), WGMMA_CELLS_4(d, i + 4), WGMMA_CELLS_4(d, i + 8), WGMMA_CELLS_4(d, i + 12)
#define WGMMA_CELLS_32(d, i) WGMMA_CELLS_16(d, i), WGMMA_CELLS_16(d, i + 16)
#define WGMMA_CELLS_64(d, i) WGMMA_CELLS_32(d, i), WGMMA_CELLS_32(d, i + 32)

// The instruction for fp16 or bf16 operands: text before it, shape, accumulator names, text after them, then the
// operands.
#define WGMMA(FRONT, SHAPE, NAMES, REST, ...)                                                                      \
    if constexpr (FP16)                                                                                            \
        asm volatile(FRONT "wgmma.mma_async.sync.aligned." SHAPE ".f32.f16.f16 {" NAMES "}, " REST : __VA_ARGS__); \
    else                                                                                                           \
        asm volatile(FRONT "wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" NAMES "}, " REST : __VA_ARGS__)

// d = a * b (+ d), both operands K-major.
template <bool FP16>
DEVICE void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
    WGMMA("{ .reg .pred accumulate; setp.ne.b32 accumulate, %34, 0;\n", "m64n64k16", WGMMA_NAMES_32,
          "%32, %33, accumulate, 1, 1, 0, 0; }", WGMMA_CELLS_32(d, 0)
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d = a * b (+ d if ADD): 64 rows, both operands K-major in shared memory.
template <bool FP16, bool ADD>
DEVICE void wgmma_keys(float (&d)[64], uint64_t a, uint64_t b) {
    WGMMA("", "m64n128k16", WGMMA_NAMES_64, "%64, %65, %66, 1, 1, 0, 0;", WGMMA_CELLS_64(d, 0)
          : "l"(a), "l"(b), "n"(ADD ? 1 : 0));
}

template <bool FP16, bool ADD>
DEVICE void wgmma_keys(float (&d)[32], uint64_t a, uint64_t b) {
    WGMMA("", "m64n64k16", WGMMA_NAMES_32, "%32, %33, %34, 1, 1, 0, 0;", WGMMA_CELLS_32(d, 0)
          : "l"(a), "l"(b), "n"(ADD ? 1 : 0));
}

// d += a * b for SPAN columns of d from FIRST on; a is K-major, b is MN-major.
template <bool FP16, int FIRST, int SPAN, int N>
DEVICE void wgmma_add(float (&d)[N], uint64_t a, uint64_t b) {
    static_assert(FIRST + SPAN <= N * 2);
    constexpr int i = FIRST / 2;
    if constexpr (SPAN == 128)
        WGMMA("", "m64n128k16", WGMMA_NAMES_64, "%64, %65, 1, 1, 1, 0, 1;", WGMMA_CELLS_64(d, i) : "l"(a), "l"(b));
    else
        WGMMA("", "m64n64k16", WGMMA_NAMES_32, "%32, %33, 1, 1, 1, 0, 1;", WGMMA_CELLS_32(d, i) : "l"(a), "l"(b));
}

// d = a * b (+ d if ADD) for SPAN columns of d (0: all) from FIRST on. a is 64 x 16 in registers: a thread holds its
// two rows at k = 2 (lane % 4) + {0, 1}, then at those + 8. MN_MAJOR: the rows of b in shared memory are indices of K.
template <bool FP16, bool MN_MAJOR, bool ADD = true, int FIRST = 0, int SPAN = 0, int N>
DEVICE void wgmma(float (&d)[N], const uint32_t (&a)[4], uint64_t b) {
    constexpr int i = FIRST / 2, COLUMNS = SPAN ? SPAN : N * 2;
    static_assert(FIRST + COLUMNS <= N * 2);
    if constexpr (COLUMNS == 128)
        WGMMA("", "m64n128k16", WGMMA_NAMES_64, "{%64, %65, %66, %67}, %68, %70, 1, 1, %69;", WGMMA_CELLS_64(d, i)
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MN_MAJOR ? 1 : 0), "n"(ADD ? 1 : 0));
    else if constexpr (COLUMNS == 16)
        WGMMA("", "m64n16k16", WGMMA_NAMES_8, "{%8, %9, %10, %11}, %12, %14, 1, 1, %13;", WGMMA_CELLS_8(d, i)
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MN_MAJOR ? 1 : 0), "n"(ADD ? 1 : 0));
    else if constexpr (COLUMNS == 32)
        WGMMA("", "m64n32k16", WGMMA_NAMES_16, "{%16, %17, %18, %19}, %20, %22, 1, 1, %21;", WGMMA_CELLS_16(d, i)
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MN_MAJOR ? 1 : 0), "n"(ADD ? 1 : 0));
    else
        WGMMA("", "m64n64k16", WGMMA_NAMES_32, "{%32, %33, %34, %35}, %36, %38, 1, 1, %37;", WGMMA_CELLS_32(d, i)
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MN_MAJOR ? 1 : 0), "n"(ADD ? 1 : 0));
}

// An operand without swizzle whose rows are all alike: 8 columns of 16 numbers in 256 bytes.
DEVICE uint64_t unswizzled_descriptor(uint32_t address) {
    return uint64_t{128 >> 4} << 32 | uint64_t{128 >> 4} << 16 | (address & 0x3ffff) >> 4;
}

// d += a * b, 8 columns; a as above.
template <bool FP16>
DEVICE void wgmma_8(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
    WGMMA("", "m64n8k16", "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;", WGMMA_CELLS_4(d, 0)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d = a * b (+ d if ADD), e4m3: a is 64 x 32 in registers, at k = 4 (lane % 4) + {0 to 3} and those + 16; b is K-major.
template <bool ADD, int N>
DEVICE void wgmma_e4m3(float (&d)[N], const uint32_t (&a)[4], uint64_t b) {
    static_assert(N == 32 || N == 64);
    if constexpr (N == 32)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES_32
                     "}, {%32, %33, %34, %35}, %36, %37, 1, 1;"
                     : WGMMA_CELLS_32(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD ? 1 : 0));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_NAMES_64
                     "}, {%64, %65, %66, %67}, %68, %69, 1, 1;"
                     : WGMMA_CELLS_64(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD ? 1 : 0));
}

// The same for 64 columns, with a K-major in shared memory too.
template <bool ADD>
DEVICE void wgmma_e4m3(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES_32 "}, %32, %33, %34, 1, 1;"
                 : WGMMA_CELLS_32(d, 0)
                 : "l"(a), "l"(b), "n"(ADD ? 1 : 0));
}

// The largest of a thread's scores of each of its two rows: s[4 j + 2 i + {0, 1}] are of row i.
template <int CELLS>
DEVICE void own_maxima(const float (&s)[CELLS], float (&top)[2]) {
    float partial[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[i] = fmaxf(s[i], s[i + 4]);
#pragma unroll
    for (int i = 8; i < CELLS; ++i) partial[i % 4] = fmaxf(partial[i % 4], s[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = fmaxf(partial[2 * i], partial[2 * i + 1]);
}

// The largest of all scores of each row, which four lanes have.
template <int CELLS>
DEVICE void row_maxima(const float (&s)[CELLS], float (&top)[2]) {
    own_maxima(s, top);
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
}
