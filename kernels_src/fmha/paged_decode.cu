// Paged attention of few query tokens a request (decode, draft tokens): grouped queries; KV bf16, fp16 or e4m3.
//
//   page table --> producer warps --TMA or cp.async--> ring of buffers  K V K V ...   (full / empty mbarriers)
//                                                        |
//   few rows: 4 (or 2 x 4) consumer warps, each 16 of    v
//   every 64 tokens (and half of the rows):
//       S^T = K Q^T   (tokens x rows)   -> online softmax over tokens -> P^T (16 bits)
//       O^T += V^T P^T (head_dim x rows), fp32 in registers
//   many rows: 2 warpgroups, each every other tile (or half of the rows):
//       S = Q K^T -> online softmax -> P;  O += P V
//                                                        |
//   their (maximum, sum, O) meet in shared memory -------+--> output, or a partial in the workspace,
//                                                             merged by the CTA that arrives last
//
// Rows are (query token, query head of a KV head's group), token-major, padded to ROWS; more rows are more row tiles. Of
// warps they sit on the 8-wide side of the MMA, so that a group of 8 wastes nothing, and a row's arithmetic does not depend
// on ROWS. e4m3 keys and values become fp16 on their way to the MMA: in registers of warps; for warpgroups, which multiply
// e4m3 queries by the keys as they are, by four warps more, from the ring into a second one.
//
// The grid is persistent and comes from bounds alone. A pair is a (request, KV head, row tile). CTAs work in teams of
// `cta_group_size`, each member on its own pair of a block of as many, so that neighbours read the same tokens at about the
// same time (faster by measurement: benchmarks/results/grid_choice.json). All tiles of all blocks form one line; team c of n
// takes the tiles [c T / n, (c + 1) T / n). A pair that one team holds whole is finished there; of any other, each CTA
// writes a partial. Split boundaries are a pure function of the lengths and the grid; with `splits` they are one of the
// request's own lengths alone (batch invariance), and every split is a part of its own.
// Or each pair has a cluster for itself, of 1 to 8 CTAs: each takes an equal part of the pair's tiles, which may be none, and
// they merge through each other's shared memory.
//
// Build: -DHEAD_DIM=n -DKV_E4M3=0|1 -DMMA_FP16=0|1 (e4m3 becomes fp16, which holds it exactly; else the type of K and V)
//        -DQ_E4M3=0|1 -DROWS=n -DTILE_TOKENS=64|128
//        -DCONSUMER_WARPGROUPS=1|2 -DWARPGROUP_MMA=0|1 -DUSE_TMA=0|1 -DBUFFERS=n -DCTAS_PER_SM=n -DSHARED_BYTES=n
//        -DKERNEL_NAME=symbol

#include "decode/produce.cuh"
#if WARPGROUP_MMA
#include "decode/warpgroups.cuh"
#else
#include "decode/warps.cuh"
#endif

namespace paged_decode {

// By one thread: where several initialise, the compiler makes it a loop over them, of nearly a hundred cycles each.
DEVICE void prepare_barriers(Shared& shared) {
#pragma unroll
    for (int i = 0; i < BUFFERS; ++i) {
        // TMA: one arrival that announces bytes. cp.async: one arrival a producer lane.
        mbarrier_init(shared_address(&shared.full[i]), USE_TMA ? 1 : 32);
        const bool converted = KEYS_CONVERTED || i % 2 == 1;
        mbarrier_init(shared_address(&shared.empty[i]), CONVERTS && converted ? CONVERTERS / 32 : BUFFER_READERS);
    }
#pragma unroll
    for (int i = 0; i < (CONVERTS ? CONVERTED_BUFFERS : 0); ++i) {
        mbarrier_init(shared_address(&shared.converted_full[i]), CONVERTERS / 32);
        mbarrier_init(shared_address(&shared.converted_empty[i]), BUFFER_READERS);
    }
#pragma unroll
    for (int i = 0; i < (WARPGROUP_MMA && !CONVERTS ? PARTIES : 0); ++i)
        mbarrier_init(shared_address(&shared.cleared[i]), BUFFER_READERS);
#if USE_TMA
    fence_mbarrier_init();
#endif
}

// What the first pieces need comes to L2 while the lengths are read: page table and queries, a line a consumer of the grid.
// A hint only: nothing is read before the grid in front has ended.
DEVICE void prefetch_inputs(const Params& p) {
    const int64_t line = static_cast<int64_t>((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * CONSUMERS + threadIdx.x;
    if (line * 32 < p.batch * p.table_stride) prefetch_to_l2(static_cast<const int*>(p.page_table) + line * 32);
    const int item = p.q_type == TYPE_E4M3 ? 1 : 2;
    if (line * 128 < p.tokens * p.q_token_stride * item) prefetch_to_l2(static_cast<const char*>(p.q) + line * 128);
}

DEVICE void report_bounds(const Params& p) {
    uint32_t seen = 0;
    for (int b = threadIdx.x; b < p.batch; b += THREADS) {
        const int length = stated_length(p, b);
        if (length > p.max_seq_len) seen |= STATUS_LENGTH_OVER_BOUND;
        if (length < 0) seen |= STATUS_LENGTH_NEGATIVE;
        if (p.q_cu_seq_lens != nullptr) {
            const int* starts = static_cast<const int*>(p.q_cu_seq_lens) + b;
            const int64_t q_len = static_cast<int64_t>(starts[1]) - starts[0];
            if (q_len < 0 || q_len > p.q_len || starts[0] < 0 || starts[1] > p.tokens) seen |= STATUS_QUERIES;
        }
    }
    if (seen) atomicOr(static_cast<uint32_t*>(p.status), seen);
}

}  // namespace paged_decode

extern "C" __global__ void __launch_bounds__(paged_decode::THREADS, CTAS_PER_SM)
    KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace paged_decode;
    extern __shared__ __align__(1024) char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    // The producers have the longest way to the first key: all else that has to be done is not theirs.
    if (threadIdx.x < CONSUMERS) {
        if (threadIdx.x == 0) {
            prepare_barriers(shared);
#if USE_TMA
            prefetch_tensor_map(&p.k_map);
            prefetch_tensor_map(&p.v_map);
#endif
        }
        prefetch_inputs(p);
        named_barrier_arrive<THREADS>(PREPARED_BARRIER);
    }
    wait_for_previous_grid();
    const Share share = find_share(p);  // by all warps alike: its code is fetched once
    if (threadIdx.x >= CONSUMERS) {
        named_barrier_sync<THREADS>(PREPARED_BARRIER);
        if constexpr (HANDS_OVER_REGISTERS) give_registers<HELPER_REGISTERS>();
        if (threadIdx.x < FIRST_CONVERTER) {
            produce(p, share, threadIdx.x / 32 - CONSUMER_WARPS, shared);
            allow_next_grid();
        } else {
#if WARPGROUP_MMA && KV_E4M3
            convert_tiles(p, share, shared);
#endif
        }
    } else {
        if constexpr (HANDS_OVER_REGISTERS) take_registers<CONSUMER_REGISTERS>();
        if constexpr (SHARE_IN_SHARED) {
            if (threadIdx.x == 0) {
                shared.share[0] = share;
#if WARPGROUP_MMA
                shared.open_parts.count = 0;
#endif
            }
            named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
            consume(p, shared.share[0], shared);
        } else {
            consume(p, share, shared);
        }
    }
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) report_bounds(p);
}
