// Paged MLA decode like paged_mla_decode.cu, for 16 query rows. Rows map to the N dimension (8) of warp-level MMAs, so
// that nothing is padded, and e4m3 becomes fp16 on its way from shared memory to the products.
//
//   4 producer warps   queries, then tiles of 64 keys --> pipeline
//   4 QK warps         S^T = K Q^T of 16 keys each, queries in registers, softmax; P^T --> shared memory
//   PV warps           O^T += V^T P^T, 64 columns each
//
// QK warps are up to two tiles ahead. They all subtract the same maxima, which are raised only when a score exceeds one
// by more than 2^8: an mbarrier among the QK warps tells whether any did, and with P the PV warps get the factors by
// which they rescale O.
//
// Scheduling, splits and merging are those of paged_mla_decode.cu.
//
// Build: -DLATENT=512|256|128 -DROPE=64|32|0 -DKV_E4M3=0|1 -DROWS=16 -DTILE_TOKENS=64 -DBOX_COLUMNS=64|128
//        -DSTAGES=n -DKERNEL_NAME=symbol

#include "few_rows/producer.cuh"
#include "few_rows/page_tiles.cuh"

extern "C" __global__ void __launch_bounds__(paged_mla_decode::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ PagedMlaDecodeParams p) {
    using namespace paged_mla_decode;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == FIRST_QK_THREAD) {
        init_barriers(shared);
        prefetch_tensor_map(&p.kv_map);
    }
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_work_range(p, shared.range);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= FIRST_PRODUCER_THREAD / 32 && warp < FIRST_QK_THREAD / 32)
        prefetch_speculatively(p, warp - FIRST_PRODUCER_THREAD / 32);
    __syncthreads();
    const WorkRange& range = shared.range;
    if (warp >= FIRST_QK_THREAD / 32) {
        setmaxnreg_inc<QK_REGISTERS>();
        score(p, range, shared);
    } else if (warp >= FIRST_PRODUCER_THREAD / 32) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        load(p, range, shared);
        allow_next_grid();
        if (blockIdx.x == 0) report_invalid_lengths(p, threadIdx.x - FIRST_PRODUCER_THREAD, PRODUCER_WARPS * 32);
    } else {
        setmaxnreg_dec<CONSUMER_REGISTERS>();
        if (consume(p, range, shared)) merge_range(p, range, reinterpret_cast<char*>(&shared));
    }
}
