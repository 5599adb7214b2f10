// Paged decode of multi-head latent attention as paged_mla_decode.cu does it, for 16 query rows. Rows are the narrow side of
// warp products, so nothing is padded, and e4m3 becomes fp16 on its way from shared memory to the products.
//
//   4 loading warps   queries, then tiles of 64 keys --> ring
//   4 scoring warps   S^T = K Q^T of 16 keys each, queries in registers; P^T --> shared memory
//   consuming warps   O^T += V^T P^T, 64 columns each
//
// Scorers are up to two tiles ahead. All subtract the same maxima, which follow only when a score exceeds one by more than
// 2^8: one barrier among the scorers tells whether any did, and with P the consumers get the factors for what they have.
//
// Shares of the line of tiles, parts and merging are those of the other kernel.
//
// Build: -DLATENT=512|256 -DKV_E4M3=0|1 -DROWS=16 -DTILE_TOKENS=64 -DBOX_COLUMNS=64|128 -DSTAGES=n -DSHARED_BYTES=n
//        -DKERNEL_NAME=symbol

#include "few/loading.cuh"
#include "few/scores.cuh"
#include "few/values.cuh"

extern "C" __global__ void __launch_bounds__(paged_mla_decode::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ PagedMlaDecodeParams p) {
    using namespace paged_mla_decode;
    extern __shared__ __align__(1024) char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    if (threadIdx.x == FIRST_SCORER) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), LOADER_WARPS);
            mbarrier_init(shared_address(&shared.empty[i]), CONSUMER_WARPS);
        }
        for (int i = 0; i < PLACES; ++i) {
            mbarrier_init(shared_address(&shared.checked[i].full), SCORER_WARPS);
            mbarrier_init(shared_address(&shared.p_full[i]), SCORER_WARPS);
            mbarrier_init(shared_address(&shared.p_empty[i]), CONSUMER_WARPS);
        }
        mbarrier_init(shared_address(&shared.sums_full), SCORER_WARPS);
        mbarrier_init(shared_address(&shared.sums_empty), CONSUMER_WARPS);
        fence_mbarrier_init();
        prefetch_tensor_map(&p.kv_map);
    }
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_share(p, shared.share);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= FIRST_LOADER / 32 && warp < FIRST_SCORER / 32) guess_first(p, warp - FIRST_LOADER / 32);
    __syncthreads();
    const Share& share = shared.share;
    if (warp >= FIRST_SCORER / 32) {
        take_registers<SCORER_REGISTERS>();
        score(p, share, shared);
    } else if (warp >= FIRST_LOADER / 32) {
        give_registers<LOADER_REGISTERS>();
        load(p, share, shared);
        allow_next_grid();
        if (blockIdx.x == 0) report_lengths(p, threadIdx.x - FIRST_LOADER, LOADER_WARPS * 32);
    } else {
        give_registers<CONSUMER_REGISTERS>();
        if (consume(p, share, shared)) merge_shares(p, share, shared_memory);
    }
}
