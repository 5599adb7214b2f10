// MLA decode over lists in clusters, 16 or 32 query rows at a time. As few_rows_mla_decode.cu, with other producers:
//
//   4 producer warps   a list's entries; its holes are left out; one bulk copy per row --> pipeline of half tiles
//   QK warps           the first queries; S^T = K Q^T of 16 keys each; softmax; P^T --> shared memory
//   PV warps           O^T += V^T P^T, 64 columns each
//
// A tile of the pipeline has 64 entries that name a row, the last of a list fewer, and says how many keys it has and
// whether it is the last.
//
// Rows of e4m3 with a scale for each 128 columns: a QK warpgroup multiplies converted keys by queries in shared memory,
// and the sums of each 128 columns by the key's scale; PV warps multiply P by the scales of their columns. A lazily
// raised power of two for each 128 columns, which outputs are multiplied by at the end, keeps these products within
// fp16. Rows of bf16: 8 QK warps multiply half of the columns each, with queries in registers; two of them add up their
// scores.
//
// A cluster of 1 to 16 CTAs computes an output tile and merges it in shared memory, 16 rows at a time: nothing goes
// through a workspace. One cluster may compute several output tiles, one after the other.
//
// Build: -DSPARSE=1 -DLATENT=512 -DROPE=64|0 -DKV_E4M3=0|1 -DROWS=16|32 -DTILE_TOKENS=64 -DSPLIT_TILES=n
//        -DSTAGES=n -DCTA_PARTS=1|2 -DMAX_CLUSTER=8|16 -DKERNEL_NAME=symbol

#include "sparse/producer.cuh"
#if KV_E4M3
#include "sparse/scaled_scores.cuh"
#else
#include "sparse/bf16_scores.cuh"
#endif

extern "C" __global__ void __launch_bounds__(paged_mla_decode::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ SparseMlaDecodeParams p) {
    using namespace paged_mla_decode;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == FIRST_QK_THREAD) init_barriers(shared);
    wait_for_previous_grid();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= FIRST_QK_THREAD / 32) {
        set_registers<QK_REGISTERS>();
        if (warp == FIRST_QK_THREAD / 32) Start::announce();
        Start::wait<Start::QK>();
        score(p, shared);
    } else if (warp >= FIRST_PRODUCER_THREAD / 32) {
        set_registers<PRODUCER_REGISTERS>();
        load(p, shared);
        allow_next_grid();
        if (blockIdx.x == 0 && blockIdx.y == 0)
            report_invalid_lengths(p, threadIdx.x - FIRST_PRODUCER_THREAD, PRODUCER_WARPS * 32);
        wait_for_cluster();
    } else {
        set_registers<CONSUMER_REGISTERS>();
        Start::wait<Start::PV>();
        consume(p, shared);
    }
}
