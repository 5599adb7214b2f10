// PTX instructions that CUDA C++ does not expose: mbarriers, TMA copies, ldmatrix, mma, programmatic dependent launch.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define DEVICE __device__ __forceinline__

DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// The kernel's dynamic shared memory. The build reads its size from the comment, which is in the PTX and is no
// instruction.
template <class Storage>
DEVICE Storage& dynamic_shared_storage() {
    extern __shared__ __align__(1024) char shared_memory[];
    asm volatile("// dynamic shared bytes: %0" ::"n"(sizeof(Storage)));
    return *reinterpret_cast<Storage*>(shared_memory);
}

// Reads the thread index again, so that values derived from it need not stay in registers where they would cause
// spills.
DEVICE uint32_t reread_thread_index() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// ---- mbarriers: a phase completes after `count` arrivals, once all expected bytes have arrived ----

DEVICE void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After the last mbarrier_init: makes the initialisations visible to TMA copies.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done;\n"
        // the suspend-time hint in ns; it may wake up earlier
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1, %2;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready: }" ::"r"(barrier),
        "r"(parity), "n"(1 << 20)
        : "memory");
#else
    // mbarrier.test_wait.parity exists from sm_80 on; try_wait, which may suspend the thread, needs sm_90.
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready: }" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// ---- asynchronous copies ----

#if __CUDA_ARCH__ >= 900
DEVICE void mbarrier_arrive_expect_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// What L2 does with the lines that a copy brings; evict_unchanged acts as a copy without a policy.
enum class L2Policy { evict_first, evict_normal, evict_unchanged };

template <L2Policy POLICY>
DEVICE uint64_t l2_policy() {
    uint64_t policy;
    if constexpr (POLICY == L2Policy::evict_first)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else if constexpr (POLICY == L2Policy::evict_normal)
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    else
        asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Orders what others wrote to global memory, and this thread acquired, before bulk copies that it begins.
DEVICE void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEVICE void prefetch_tensor_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

DEVICE void tma_load_4d(uint32_t destination, const void* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                        uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
        : "memory");
}
#endif

DEVICE void cp_async_16(uint32_t destination, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

DEVICE void prefetch_to_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Brings a line to L1 without waiting for it.
DEVICE void prefetch_to_l1(const int* address) {
    asm volatile("{ .reg .b32 unused; ld.global.b32 unused, [%0]; }" ::"l"(address));
}

// Arrives once this thread's earlier cp.async have completed. "noinc": it uses one of the arrivals of mbarrier_init.
DEVICE void mbarrier_arrive_after_cp_async(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- programmatic dependent launch: no-ops unless the launch attribute is set ----

DEVICE void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- shared memory by address ----

DEVICE uint4 load_shared_uint4(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

DEVICE uint2 load_shared_uint2(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

DEVICE float2 load_shared_float2(uint32_t address) {
    const uint2 v = load_shared_uint2(address);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

DEVICE float load_shared_float(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

DEVICE void store_shared_float(uint32_t address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

DEVICE void store_shared_uint4(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// ---- clusters ----

#if __CUDA_ARCH__ >= 900
// What the cluster's threads wrote before they arrived is visible to those that have waited. Exited threads are not
// waited for.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Use where a CTA wrote nothing that another CTA reads.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of the same shared-memory variable in the cluster's CTA `rank`.
DEVICE uint32_t address_in_cta(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

DEVICE float load_cluster_float(uint32_t address) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

DEVICE float4 load_cluster_float4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
#endif

// ---- tensor cores ----

DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

DEVICE uint32_t transpose_8x8(uint32_t fragment) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

// d += a * b, with a of 16 x 16 (M x K) and b of 16 x 8 (K x N).
DEVICE void mma_bf16_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_fp16_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with 32 columns of e4m3, for SM89 and later.
DEVICE void mma_e4m3_16x8x32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- pairs of numbers in a register: the first is in the low bits ----

DEVICE uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

DEVICE uint32_t pack_fp16(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

DEVICE uint16_t pack_e4m3(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

DEVICE float2 unpack_bf16(uint32_t pair) { return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair)); }

DEVICE float2 unpack_fp16(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

// Two e4m3 in the low 16 bits become two fp16; exact, NaN stays NaN.
DEVICE uint32_t e4m3_pair_to_fp16(uint32_t pair) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    return static_cast<uint32_t>(halves.y) << 16 | halves.x;
}

// Four e4m3 become two pairs of fp16, the low two and the high two.
DEVICE void e4m3_to_fp16(uint32_t four, uint32_t& low, uint32_t& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high)
        : "r"(four));
}

// Four e4m3 become two pairs of bf16, the low two and the high two: exact, but NaN becomes 480 with its sign.
DEVICE void e4m3_to_bf16(uint32_t four, uint32_t& low, uint32_t& high) {
    // Each code is extended by its sign, so that sign, exponent and mantissa come to their places together; the product
    // adds the difference of the exponents' biases, also to subnormal codes.
    asm("{ .reg .b32 l, h; prmt.b32 l, %2, 0, 0x9180; prmt.b32 h, %2, 0, 0xb3a2;\n"
        "shl.b32 l, l, 4; shl.b32 h, h, 4; and.b32 l, l, 0x87f087f0; and.b32 h, h, 0x87f087f0;\n"
        "mul.rn.bf16x2 %0, l, %3; mul.rn.bf16x2 %1, h, %3; }"
        : "=r"(low), "=r"(high)
        : "r"(four), "r"(0x7b807b80));  // 2^120
}

DEVICE float2 unpack_e4m3(uint16_t pair) { return unpack_fp16(e4m3_pair_to_fp16(pair)); }

// ---- arithmetic ----

DEVICE float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23); }

// The exponent e for which bf16 numbers divided by 2^e fit fp16, from the biased exponent of the largest. At 112 the
// largest bf16 just fits; -100 keeps 2^e far from the limits of fp32 when it is multiplied with other factors.
DEVICE int fp16_range_exponent(uint32_t biased) { return min(max(static_cast<int>(biased) - 127, -100), 112); }

// 16 bf16 columns times a factor, as fp16 in the order in which ldmatrix distributes the bytes of 16 e4m3 columns:
// 4 i + {0, 1} for i = 0 to 3, then 4 i + {2, 3}.
DEVICE void bf16_to_fp16_as_e4m3(const uint32_t (&columns)[8], float factor, uint32_t (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 wide = unpack_bf16(columns[i]);
        to[i % 2 * 4 + i / 2] = pack_fp16(wide.x * factor, wide.y * factor);
    }
}

DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- ordering between CTAs ----

DEVICE uint32_t atomic_add_acq_rel(uint32_t* counter, uint32_t value) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

template <int THREADS>
DEVICE void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// The same; whether any of the threads brought true.
template <int THREADS>
DEVICE bool named_barrier_any(int id, bool value) {
    int any;
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nbar.red.or.pred p, %1, %2, p;\nselp.s32 %0, 1, 0, p;\n}"
                 : "=r"(any)
                 : "r"(id), "n"(THREADS), "r"(static_cast<int>(value))
                 : "memory");
    return any;
}
