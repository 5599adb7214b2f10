// Paged MLA decode with an e4m3 cache and queries of e4m3 or bf16; shapes and scheduling as in paged_mla_decode.cu.
//
//   producer warp           page table --> TMA --> pipeline of e4m3 tiles of 64 keys, a box for 64 columns
//   two PV warpgroups       O^T += V^T P^T, fp16 by fp16, half of the columns each: V^T goes from the tile to
//                           registers, transposed by ldmatrix, and is converted there
// With e4m3 queries:
//   QK warpgroup            S = Q K^T, e4m3 by e4m3; the first half of the next tile's columns overlaps with this
//                           tile's P = softmax, fp16 --> pipeline in shared memory
// With bf16 queries, in fp16:
//   QK warpgroup            S^T = K Q^T: K goes from the tile to registers and is converted there --> shared memory
//   two softmax warps       P = softmax, one row per thread --> pipeline in shared memory
//
// Because O and S are transposed, the converted operand is the one that may come from registers: converted values are
// never written to shared memory, whose bandwidth would bound the kernel. The QK warpgroup sets the time of a tile.
// With e4m3 queries it therefore compares maxima only when one must be raised; with bf16 queries, whose products take
// twice the time, it computes nothing but products.
//
// Build: -DLATENT=512|256|128 -DROPE=64|32|0 -DKV_E4M3=1 -DQ_E4M3=0|1 -DROWS=64 -DTILE_TOKENS=64
//        -DBOX_COLUMNS=64 -DKERNEL_NAME=symbol, and -DSEPARATE_VALUES=1 where values do not lie in their keys: then a
//        tile has boxes of both.

#include "pages.cuh"
#if Q_E4M3
#include "e4m3/qk_e4m3_queries.cuh"
#else
#include "e4m3/softmax_warps.cuh"
#include "e4m3/qk_bf16_queries.cuh"
#endif
#include "e4m3/pv.cuh"

namespace paged_mla_decode {

constexpr int P_WARPS = Q_E4M3 ? WARPGROUP / 32 : SOFTMAX_WARPS;  // that compute P
// A warpgroup that asks for more registers than are available waits forever.
constexpr int PV_REGISTERS = 168, QK_REGISTERS = Q_E4M3 ? 144 : 112, PRODUCER_REGISTERS = Q_E4M3 ? 32 : 64;
static_assert(2 * PV_REGISTERS + QK_REGISTERS + PRODUCER_REGISTERS <= THREADS / WARPGROUP * LAUNCH_REGISTERS);

DEVICE void load_tiles(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int chunk_log2 = chunk_tokens_log2(p);
    const uint64_t policy = kv_l2_policy(p);
    PipelineState<STAGES> tiles;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        PageWindow pages;
        const int last = work.first + work.key_tiles();
#pragma unroll 1
        for (int tile = work.first; tile < last; ++tile) {
            const TileChunks chunks(p, work, pages, chunk_log2, tile);
            wait_barrier(shared.empty[tiles.index], tiles.phase ^ 1);
            chunks.for_each(p, pages, [&](const Chunk& chunk) {
                const uint32_t full = shared_address(&shared.full[tiles.index]);
                if (chunk.offset == 0) mbarrier_arrive_expect_bytes(full, TILE_BOXES * chunks.box_bytes());
#pragma unroll 1
                for (int box = 0; box < BOXES; ++box)
                    chunk.load_box(&p.kv_map, box, shared_address(shared.kv[tiles.index][box]), full, policy);
#if SEPARATE_VALUES
#pragma unroll 1
                for (int box = 0; box < VALUE_BOXES; ++box)
                    chunk.load_box(&p.v_map, box, shared_address(shared.kv[tiles.index][FIRST_VALUE_BOX + box]), full,
                                   policy);
#endif
            });
            __syncwarp();
            tiles.advance();
        }
    }
}

}  // namespace paged_mla_decode

extern "C" __global__ void __launch_bounds__(paged_mla_decode::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ paged_mla_decode::Params p) {
    using namespace paged_mla_decode;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == WARPGROUP) {
        for (int b = 0; b < STAGES; ++b) {
            mbarrier_init(shared_address(&shared.full[b]), 1);
            mbarrier_init(shared_address(&shared.empty[b]), (CONSUMERS + WARPGROUP) / 32);
        }
        for (int b = 0; b < P_STAGES; ++b) {
            mbarrier_init(shared_address(&shared.p_full[b]), P_WARPS);
            mbarrier_init(shared_address(&shared.p_empty[b]), CONSUMERS / 32);
        }
#if !Q_E4M3
        mbarrier_init(shared_address(&shared.scores_full), WARPGROUP / 32);
        mbarrier_init(shared_address(&shared.scores_empty), SOFTMAX_WARPS);
#endif
        fence_mbarrier_init();
        prefetch_tensor_map(&p.kv_map);
#if SEPARATE_VALUES
        prefetch_tensor_map(&p.v_map);
#endif
    }
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_work_range(p, shared.range);
    __syncthreads();
    const WorkRange& range = shared.range;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup < CONSUMERS / WARPGROUP) {
        setmaxnreg_inc<PV_REGISTERS>();
        if (multiply_values(p, shared)) merge_range(p, range, reinterpret_cast<char*>(&shared));
    } else if (warpgroup == CONSUMERS / WARPGROUP) {
        if constexpr (QK_REGISTERS > LAUNCH_REGISTERS)
            setmaxnreg_inc<QK_REGISTERS>();
        else
            setmaxnreg_dec<QK_REGISTERS>();
        score(p, range, shared);
        if (blockIdx.x == 0) report_invalid_lengths(p, threadIdx.x - CONSUMERS, HELPERS);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x < THREADS - WARPGROUP + 32) {
            load_tiles(p, range, shared);
            allow_next_grid();
        }
#if !Q_E4M3
        else if (threadIdx.x < THREADS - WARPGROUP + 32 + SOFTMAX_WARPS * 32) {
            weigh(p, range, shared);
        }
#endif
        if (blockIdx.x == 0) report_invalid_lengths(p, threadIdx.x - CONSUMERS, HELPERS);
    }
}
