// Paged decode of multi-head latent attention with a cache of e4m3 and queries of e4m3 or bf16; shapes and sharing of the work
// as in paged_mla_decode.cu.
//
//   loading warp             page table --> bulk tensor copies --> a ring of raw tiles of 64 keys, LATENT / 64 + 1 boxes
//   two output warpgroups    O^T += V^T P^T, fp16 by fp16, half of the columns each: V^T goes from the tile to registers,
//                            transposed by ldmatrix and converted there
// With e4m3 queries
//   scoring warpgroup        S = Q K^T, e4m3 by e4m3 as they are, of the next tile's columns the first half while this tile's
//                            P = softmax, fp16 --> a ring in shared memory
// and with bf16 queries, in fp16
//   scoring warpgroup        S^T = K Q^T: K goes from the tile to registers and is converted there --> shared memory
//   two softmax warps        P = softmax, a row each thread --> a ring in shared memory
//
// With O and S transposed what is converted is the operand that may come from registers: converted values are never written to
// shared memory, whose bandwidth bounds a kernel that does. A tile's time is that of the scoring warpgroup. So with e4m3
// queries it looks for maxima only where one has to follow; with bf16 queries, whose products take twice the time, it does
// nothing but products.
//
// Build: -DLATENT=512|256 -DKV_E4M3=1 -DQ_E4M3=0|1 -DROWS=64 -DTILE_TOKENS=64 -DBOX_COLUMNS=64 -DSHARED_BYTES=n
//        -DKERNEL_NAME=symbol

#include "pages.cuh"
#if Q_E4M3
#include "scoring.cuh"
#else
#include "row_softmax.cuh"
#include "scoring_transposed.cuh"
#endif
#include "transposed.cuh"

namespace paged_mla_decode {

constexpr int P_WARPS = Q_E4M3 ? WARPGROUP / 32 : SOFTMAX_WARPS;  // that hand P on
// A warpgroup that asks for more registers than the others leave waits for ever.
constexpr int OUTPUT_REGISTERS = 168, SCORING_REGISTERS = Q_E4M3 ? 144 : 112, LOADING_REGISTERS = Q_E4M3 ? 32 : 64;
static_assert(2 * OUTPUT_REGISTERS + SCORING_REGISTERS + LOADING_REGISTERS <= THREADS / WARPGROUP * LAUNCH_REGISTERS);

DEVICE void load_tiles(const Params& p, const Share& share, Shared& shared) {
    const int chunk_log2 = chunk_tokens_log2(p);
    const uint64_t policy = keys_policy(p);
    Turn<BUFFERS> tiles;
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        PageWindow pages;
        const int last = piece.first + piece.steps();
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            const TilePages at(p, piece, pages, chunk_log2, tile);
            wait_barrier(shared.empty[tiles.index], tiles.parity ^ 1);
            if (elect_one()) {
                const uint32_t full = shared_address(&shared.full[tiles.index]);
                mbarrier_arrive_expect_bytes(full, BOXES * at.chunks << (chunk_log2 + ROW_BYTES_LOG2));
#pragma unroll 1
                for (int box = 0; box < BOXES; ++box)
                    copy_box(p, at, chunk_log2, box, shared_address(shared.kv[tiles.index][box]), full, policy);
            }
            __syncwarp();
            tiles.advance();
        }
    }
}

}  // namespace paged_mla_decode

extern "C" __global__ void __launch_bounds__(paged_mla_decode::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ PagedMlaDecodeParams p) {
    using namespace paged_mla_decode;
    extern __shared__ __align__(1024) char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    if (threadIdx.x == WARPGROUP) {
        for (int b = 0; b < BUFFERS; ++b) {
            mbarrier_init(shared_address(&shared.full[b]), 1);
            mbarrier_init(shared_address(&shared.empty[b]), (CONSUMERS + WARPGROUP) / 32);
        }
        for (int b = 0; b < HANDOVERS; ++b) {
            mbarrier_init(shared_address(&shared.p_full[b]), P_WARPS);
            mbarrier_init(shared_address(&shared.p_empty[b]), CONSUMERS / 32);
        }
#if !Q_E4M3
        mbarrier_init(shared_address(&shared.scores_full), WARPGROUP / 32);
        mbarrier_init(shared_address(&shared.scores_empty), SOFTMAX_WARPS);
#endif
        fence_mbarrier_init();
        prefetch_tensor_map(&p.kv_map);
    }
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_share(p, shared.share);
    __syncthreads();
    const Share& share = shared.share;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup < CONSUMERS / WARPGROUP) {
        take_registers<OUTPUT_REGISTERS>();
        if (multiply_values(p, shared)) merge_shares(p, share, shared_memory);
    } else if (warpgroup == CONSUMERS / WARPGROUP) {
        if constexpr (SCORING_REGISTERS > LAUNCH_REGISTERS)
            take_registers<SCORING_REGISTERS>();
        else
            give_registers<SCORING_REGISTERS>();
        score(p, share, shared);
        if (blockIdx.x == 0) report_lengths(p, threadIdx.x - CONSUMERS, HELPERS);
    } else {
        give_registers<LOADING_REGISTERS>();
        if (threadIdx.x < THREADS - WARPGROUP + 32) {
            load_tiles(p, share, shared);
            allow_next_grid();
        }
#if !Q_E4M3
        else if (threadIdx.x < THREADS - WARPGROUP + 32 + SOFTMAX_WARPS * 32) {
            weigh(p, share, shared);
        }
#endif
        if (blockIdx.x == 0) report_lengths(p, threadIdx.x - CONSUMERS, HELPERS);
    }
}
