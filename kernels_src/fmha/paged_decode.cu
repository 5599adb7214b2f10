// Paged attention for few query tokens per request (decode, draft tokens): grouped queries; KV cache of bf16, fp16 or
// e4m3.
//
//   page table --> producer warps --TMA or cp.async--> pipeline of stages  K V K V ...   (full / empty mbarriers)
//                                                        |
//   few rows: 4 (or 2 x 4) consumer warps, each 16 of    v
//   every 64 tokens (and half of the rows):
//       S^T = K Q^T   (tokens x rows)   -> online softmax over tokens -> P^T (16 bits)
//       O^T += V^T P^T (head_dim x rows), fp32 in registers
//   bits that prefill gives too (SEGMENTS): decode/consumer_segments.cuh, decode/consumer_segments_warpgroup.cuh
//   many rows: 2 consumer warpgroups, each every other KV tile (or half of the rows):
//       S = Q K^T -> online softmax -> P;  O += P V
//                                                        |
//   merge of (maximum, sum, O) in shared memory ---------+--> output, or a split-KV partial in the workspace,
//                                                             merged by the CTA that arrives last
//
// Rows are (query token, query head of a KV head's group), token-major, padded to ROWS; more rows are more row tiles.
// In the warp kernels, rows map to the MMA's N dimension (8), so that a group of 8 query heads needs no padding, and a
// row's arithmetic does not depend on ROWS. e4m3 keys and values become fp16 before the MMA, with SEGMENTS the type of
// the queries: in the warp kernels in registers, in the warpgroup kernels by four converter warps, from the first
// pipeline into a second one. Warpgroup kernels for e4m3 queries multiply e4m3 keys as they are.
//
// The grid is persistent and follows from bounds alone. Work is scheduled in one of three ways
// (common/stream_k.cuh, decode/scheduler.cuh):
// - Stream-K: the KV tiles of all output tiles form one tile space; group c of n computes KV tiles
//   [c T / n, (c + 1) T / n). Output tiles that lie in one CTA group's range are finished there; of the others, each
//   CTA writes a partial. Split boundaries follow from the lengths and the grid.
// - `splits` > 0 (batch invariance): split boundaries follow from the request's own lengths alone (with SEGMENTS: they
//   are absolute), and a CTA group computes the splits that begin in its range.
// - Clusters: each output tile has a cluster of 1 to 8 CTAs, which split its KV tiles evenly (a share may be empty) and
//   merge through distributed shared memory.
// The CTAs of a group work side by side on neighbouring KV heads, which measured faster:
// benchmarks/results/grid_choice.json.
//
// Build: -DHEAD_DIM=n -DKV_E4M3=0|1 -DMMA_FP16=0|1 (the MMA's type: fp16, which holds e4m3 exactly, or bf16)
//        -DQ_E4M3=0|1 -DROWS=n -DTILE_TOKENS=64|128 -DCONSUMER_WARPGROUPS=1|2 -DWARPGROUP_MMA=0|1
//        -DSEGMENTS=0|1 (default: 0) -DUSE_TMA=0|1
//        -DSTAGES=n -DCTAS_PER_SM=n -DL2_POLICY=evict_first|evict_unchanged (with USE_TMA) -DKERNEL_NAME=symbol

#include "decode/producer.cuh"
#if SEGMENTS && WARPGROUP_MMA
#include "decode/consumer_segments_warpgroup.cuh"
#elif SEGMENTS
#include "decode/consumer_segments.cuh"
#elif WARPGROUP_MMA
#include "decode/consumer_warpgroups.cuh"
#else
#include "decode/consumer_warps.cuh"
#endif

namespace paged_decode {

// One thread initialises all barriers; with several, the compiler serialises them at about 100 cycles each.
DEVICE void initialise_barriers(SharedStorage& shared) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        // TMA: one arrival that expects bytes. cp.async: one arrival per producer lane.
        mbarrier_init(shared_address(&shared.full[i]), USE_TMA ? 1 : 32);
        const bool converted = KEYS_CONVERTED || i % 2 == 1;
        mbarrier_init(shared_address(&shared.empty[i]), CONVERTS && converted ? CONVERTERS / 32 : STAGE_READERS);
    }
#pragma unroll
    for (int i = 0; i < (CONVERTS ? CONVERTED_STAGES : 0); ++i) {
        mbarrier_init(shared_address(&shared.converted_full[i]), CONVERTERS / 32);
        mbarrier_init(shared_address(&shared.converted_empty[i]), STAGE_READERS);
    }
#pragma unroll
    for (int i = 0; i < (WARPGROUP_MMA && !CONVERTS ? KV_PARTITIONS : 0); ++i)
        mbarrier_init(shared_address(&shared.cleared[i]), STAGE_READERS);
#pragma unroll
    for (int i = 0; i < RING_GROUPS; ++i) mbarrier_init(shared_address(&shared.partials_full[i]), 1);
#if USE_TMA
    fence_mbarrier_init();
#endif
}

// Brings page table and queries to L2 while the lengths are read, one line per consumer thread of the grid. Only a
// hint, so it may run before the previous grid has ended.
DEVICE void prefetch_inputs(const Params& p) {
    const int64_t line =
        static_cast<int64_t>((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * CONSUMERS + threadIdx.x;
    if (line * 32 < p.batch * p.table_stride) prefetch_to_l2(static_cast<const int*>(p.page_table) + line * 32);
    const int item = p.q_type == TYPE_E4M3 ? 1 : 2;
    if (line * 128 < p.tokens * p.q_token_stride * item) prefetch_to_l2(static_cast<const char*>(p.q) + line * 128);
}

}  // namespace paged_decode

extern "C" __global__ void __launch_bounds__(paged_decode::THREADS, CTAS_PER_SM)
    KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace paged_decode;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    // Producers are on the critical path to the first key, so the consumers do the rest of the setup.
    if (threadIdx.x < CONSUMERS) {
        if (threadIdx.x == 0) {
            initialise_barriers(shared);
#if USE_TMA
            prefetch_tensor_map(&p.k_map);
            prefetch_tensor_map(&p.v_map);
#endif
        }
        prefetch_inputs(p);
        named_barrier_arrive<THREADS>(PREPARED_BARRIER);
    }
    wait_for_previous_grid();
    const WorkRange range = find_work_range(p);  // in all warps alike, so that its code is fetched once
    if (threadIdx.x >= CONSUMERS) {
        named_barrier_sync<THREADS>(PREPARED_BARRIER);
        if constexpr (USES_SETMAXNREG) setmaxnreg_dec<HELPER_REGISTERS>();
        if (threadIdx.x < FIRST_CONVERTER) {
            const int warp = threadIdx.x / 32 - CONSUMER_WARPS;
            if (!SEGMENTS || warp < PRODUCER_WARPS) produce(p, range, warp, shared);
            allow_next_grid();
        } else {
#if WARPGROUP_MMA && KV_E4M3
            convert_tiles(p, range, shared);
#endif
        }
    } else {
        if constexpr (USES_SETMAXNREG) setmaxnreg_inc<CONSUMER_REGISTERS>();
        if constexpr (RANGE_IN_SHARED) {
            if (threadIdx.x == 0) {
                shared.range[0] = range;
#if WARPGROUP_MMA
                shared.open_splits.count = 0;
#endif
            }
            named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
            consume(p, shared.range[0], shared);
        } else {
            consume(p, range, shared);
        }
    }
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) stream_k::report_invalid_lengths(p, threadIdx.x, THREADS);
}
