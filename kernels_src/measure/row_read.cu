// Read-only bandwidth test: rows of a cache that a list names, by one bulk copy each, as kernels over lists read them.
//
//   list [rows] --> rows of data, 32 to a stage in shared memory --> sum of 32-bit words per CTA (modulo 2^32)
//     --> sums [CTAs]
//
// A CTA has every so many-th piece of the list. Two producer warps copy the rows of one piece after the other in turns;
// the consumer warps add up what arrives, so that a test can see that every word was read.
//
// Build: -DL2_POLICY=word (an L2Policy) -DKERNEL_NAME=symbol.

#include "../common/pipeline.cuh"
#include "KernelConstants.h"
#include "RowReadParams.h"

using Params = RowReadParams;

namespace row_read {

constexpr int PIECE_ROWS = 32, STAGES = 6;
constexpr int PRODUCERS = 2, CONSUMER_WARPS = 4, CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int THREADS = CONSUMERS + 32 * PRODUCERS;
constexpr int STAGE_UNITS = PIECE_ROWS * ROW_READ_MAX_BYTES / 16;

struct SharedStorage {
    alignas(128) uint4 pieces[STAGES][STAGE_UNITS];
    uint64_t full[STAGES], empty[STAGES];
    uint32_t sums[CONSUMER_WARPS];
};

DEVICE int rows_of(const Params& p, int piece) { return min(p.rows - piece * PIECE_ROWS, PIECE_ROWS); }

DEVICE void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

DEVICE void produce(const Params& p, SharedStorage& shared, int producer) {
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    const int lane = threadIdx.x % 32;
    const auto entry = [&](int piece) {
        return lane < rows_of(p, piece) ? static_cast<const int*>(p.indices)[piece * PIECE_ROWS + lane] : 0;
    };
    PipelineState<STAGES> state;
    state.advance(producer);
    int piece = blockIdx.x + producer * gridDim.x, row = entry(piece);
    for (int count; (count = rows_of(p, piece)) > 0; state.advance(PRODUCERS)) {
        const uint32_t full = shared_address(&shared.full[state.index]);
        const char* source = static_cast<const char*>(p.data) + int64_t(row) * p.row_bytes;
        piece += PRODUCERS * gridDim.x, row = entry(piece);  // asked for early: it takes as long as a read
        mbarrier_wait(shared_address(&shared.empty[state.index]), state.phase ^ 1);
        if (lane == 0) mbarrier_arrive_expect_bytes(full, count * p.row_bytes);
        __syncwarp();
        if (lane < count)
            bulk_copy(shared_address(shared.pieces[state.index]) + lane * p.row_bytes, source, p.row_bytes, full,
                      policy);
        __syncwarp();
    }
}

DEVICE uint32_t consume(const Params& p, SharedStorage& shared) {
    uint32_t sum = 0;
    PipelineState<STAGES> state;
    for (int piece = blockIdx.x, count; (count = rows_of(p, piece)) > 0; piece += gridDim.x, state.advance()) {
        mbarrier_wait(shared_address(&shared.full[state.index]), state.phase);
        for (int unit = threadIdx.x; unit < count * p.row_bytes / 16; unit += CONSUMERS) {
            const uint4 words = shared.pieces[state.index][unit];
            sum += (words.x + words.y) + (words.z + words.w);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[state.index]));
    }
    return sum;
}

}  // namespace row_read

extern "C" __global__ void __launch_bounds__(row_read::THREADS) KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace row_read;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared_address(&shared.full[stage]), 1);
            mbarrier_init(shared_address(&shared.empty[stage]), CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are there
    const int warp = threadIdx.x / 32;
    if (warp >= CONSUMER_WARPS) {
        produce(p, shared, warp - CONSUMER_WARPS);
    } else {
        const uint32_t sum = __reduce_add_sync(0xffffffffu, consume(p, shared));
        if (threadIdx.x % 32 == 0) shared.sums[warp] = sum;
    }
    __syncthreads();  // all consumer warps have stored their sums
    if (threadIdx.x != 0) return;
    uint32_t sum = 0;
    for (int i = 0; i < CONSUMER_WARPS; ++i) sum += shared.sums[i];
    static_cast<uint32_t*>(p.sums)[blockIdx.x] = sum;
}
