// MLA decode over lists, as sparse_mla_decode.cu, for rows of the cache of e4m3 with a scale for each 128 columns, and
// 64 query rows at a time, in CTA groups:
//
//   two producer warps      a list's entries; its holes are left out; one bulk copy per row --> pipeline of 16 keys
//   QK warpgroup            S^T = K Q^T: K goes from the tile to registers, is converted to fp16 and scaled there;
//                           P = softmax, in registers --> pipeline in shared memory
//   two PV warpgroups       O^T += V^T P^T, half of the columns each, V^T converted and scaled in registers
//
// Queries and PV warpgroups are those of paged_mla_decode_e4m3.cu with bf16 queries; there two other warps compute P.
//
// Build: -DSPARSE=1 -DLATENT=512 -DROPE=64 -DKV_E4M3=1 -DQ_E4M3=0 -DROWS=64 -DTILE_TOKENS=64 -DBOX_COLUMNS=64
//        -DSPLIT_TILES=n -DSTAGES=n -DKERNEL_NAME=symbol

#include "sparse/lists.cuh"
#include "sparse/scaled_keys.cuh"
#include "e4m3/pv.cuh"

namespace paged_mla_decode {

static_assert(STAGE_KEYS == RING_SHARE);

// A warpgroup that asks for more registers than are available waits forever.
constexpr int PV_REGISTERS = 168, QK_REGISTERS = 128, PRODUCER_REGISTERS = 48;
static_assert(2 * PV_REGISTERS + QK_REGISTERS + PRODUCER_REGISTERS <= THREADS / WARPGROUP * LAUNCH_REGISTERS);

// Fills every second stage.
DEVICE void load(const Params& p, const WorkRange& range, SharedStorage& shared, int warp) {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = row_l2_policy(p);
    PipelineState<STAGES> stages;
    stages.advance(warp);
    const auto copy = [&](uint32_t head, int count, uint32_t last) {
#pragma unroll 1
        for (int first = warp * STAGE_KEYS; first < TILE_TOKENS; first += LIST_WARPS * STAGE_KEYS) {
            const int own = copied_rows(min(max(count - first, 0), STAGE_KEYS));
            const uint32_t full = shared_address(&shared.full[stages.index]);
            wait_barrier(shared.empty[stages.index], stages.phase ^ 1);
            if (lane == 0) {
                shared.tile[stages.index] = count | last;
                mbarrier_arrive_expect_bytes(full, own * ROW_BYTES);
            }
            __syncwarp();
            copy_rows(shared_address(&shared.rows_to_copy[(head + first) % ROW_RING]), own,
                      shared_address(shared.kv[stages.index]), full, policy);
            __syncwarp();
            stages.advance(LIST_WARPS);
        }
    };
    walk_lists<LIST_WARPS>(
        p, WorkTileIterator(p, range), shared.rows_to_copy, warp, [] {}, [](const WorkTile&) {}, copy);
}

DEVICE void init_barriers(SharedStorage& shared) {
    for (int b = 0; b < STAGES; ++b) {
        mbarrier_init(shared_address(&shared.full[b]), 1);
        mbarrier_init(shared_address(&shared.empty[b]), CONSUMERS / 32);
    }
    for (int b = 0; b < P_STAGES; ++b) {
        mbarrier_init(shared_address(&shared.p_full[b]), WARPGROUP / 32);
        mbarrier_init(shared_address(&shared.p_empty[b]), CONSUMERS / 32);
    }
    fence_mbarrier_init();
}

}  // namespace paged_mla_decode

extern "C" __global__ void __launch_bounds__(paged_mla_decode::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ SparseMlaDecodeParams p) {
    using namespace paged_mla_decode;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == WARPGROUP) init_barriers(shared);
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_work_range(p, shared.range);
    __syncthreads();
    const WorkRange& range = shared.range;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup < CONSUMERS / WARPGROUP) {
        if constexpr (PV_REGISTERS > LAUNCH_REGISTERS) setmaxnreg_inc<PV_REGISTERS>();
        if (multiply_values(p, shared)) merge_range(p, range, reinterpret_cast<char*>(&shared));
    } else if (warpgroup == CONSUMERS / WARPGROUP) {
        if constexpr (QK_REGISTERS > LAUNCH_REGISTERS)
            setmaxnreg_inc<QK_REGISTERS>();
        else
            setmaxnreg_dec<QK_REGISTERS>();
        score(p, range, shared);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, threadIdx.x % WARPGROUP / 32, 0);
        if (warp < LIST_WARPS) load(p, range, shared, warp);
        allow_next_grid();
        if (blockIdx.x == 0) report_invalid_lengths(p, threadIdx.x - CONSUMERS - WARPGROUP, WARPGROUP);
    }
}
