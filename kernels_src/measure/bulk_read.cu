// Read-only bandwidth test: bulk copies to shared memory, in units that CTAs take as they get free.
//
//   data [units] of 16 bytes --> pieces in shared memory --> sum of 32-bit words per CTA (modulo 2^32) --> sums [CTAs]
//
// A producer thread takes several pieces at a time from a counter and keeps all stages of the pipeline in flight; the
// consumer warps add up what arrives, so that a test can see that every word was read. The last CTA that is done resets
// the counters for the next launch.
//
// Build: -DL2_POLICY=word (an L2Policy) -DKERNEL_NAME=symbol.

#include "../common/pipeline.cuh"
#include "KernelConstants.h"
#include "StreamingReadParams.h"

using Params = StreamingReadParams;

namespace bulk_read {

constexpr int PIECE_BYTES = 16384, PIECE_UNITS = PIECE_BYTES / 16;
constexpr int STAGES = 6;
constexpr int CONSUMER_WARPS = 4, CONSUMERS = 32 * CONSUMER_WARPS, THREADS = CONSUMERS + 32;
constexpr int MAX_PIECES = 16;  // of those that a CTA takes at a time
constexpr int TURNS = 8;  // of a CTA, at least, where there are enough pieces

struct SharedStorage {
    alignas(128) uint4 pieces[STAGES][PIECE_UNITS];
    uint64_t full[STAGES], empty[STAGES];
    int units[STAGES];  // of each piece; 0: no more will come
    uint32_t sums[CONSUMER_WARPS];
};

DEVICE void bulk_copy(uint32_t destination, const uint4* source, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

DEVICE void produce(const Params& p, SharedStorage& shared) {
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    uint32_t* counters = static_cast<uint32_t*>(p.counters);
    const int64_t pieces = (p.units + PIECE_UNITS - 1) / PIECE_UNITS;
    const int64_t at_a_time = min(max(pieces / (int64_t(gridDim.x) * TURNS), int64_t(1)), int64_t(MAX_PIECES));
    PipelineState<STAGES> state;
    uint32_t turn = atomicAdd(counters, 1);
    while (turn * at_a_time < pieces) {
        const int64_t first = turn * at_a_time, last = min(first + at_a_time, pieces);
        turn = atomicAdd(counters, 1);  // asked for early: it takes as long as a read
        for (int64_t piece = first; piece < last; ++piece) {
            const int units = static_cast<int>(min(p.units - piece * PIECE_UNITS, int64_t(PIECE_UNITS)));
            const uint32_t full = shared_address(&shared.full[state.index]);
            mbarrier_wait(shared_address(&shared.empty[state.index]), state.phase ^ 1);
            shared.units[state.index] = units;
            mbarrier_arrive_expect_bytes(full, units * 16);
            bulk_copy(shared_address(shared.pieces[state.index]),
                      static_cast<const uint4*>(p.data) + piece * PIECE_UNITS, units * 16, full, policy);
            state.advance();
        }
    }
    mbarrier_wait(shared_address(&shared.empty[state.index]), state.phase ^ 1);
    shared.units[state.index] = 0;
    mbarrier_arrive(shared_address(&shared.full[state.index]));
    __threadfence();
    if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
}

DEVICE uint32_t consume(SharedStorage& shared) {
    uint32_t sum = 0;
    PipelineState<STAGES> state;
    while (true) {
        mbarrier_wait(shared_address(&shared.full[state.index]), state.phase);
        const int units = shared.units[state.index];
        if (units == 0) return sum;
        for (int unit = threadIdx.x; unit < units; unit += CONSUMERS) {
            const uint4 words = shared.pieces[state.index][unit];
            sum += (words.x + words.y) + (words.z + words.w);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[state.index]));
        state.advance();
    }
}

}  // namespace bulk_read

extern "C" __global__ void __launch_bounds__(bulk_read::THREADS) KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace bulk_read;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared_address(&shared.full[stage]), 1);
            mbarrier_init(shared_address(&shared.empty[stage]), CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are there
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == CONSUMER_WARPS) {
        if (lane == 0) produce(p, shared);
    } else {
        const uint32_t sum = __reduce_add_sync(0xffffffffu, consume(shared));
        if (lane == 0) shared.sums[warp] = sum;
    }
    __syncthreads();  // all consumer warps have stored their sums
    if (threadIdx.x != 0) return;
    uint32_t sum = 0;
    for (int i = 0; i < CONSUMER_WARPS; ++i) sum += shared.sums[i];
    static_cast<uint32_t*>(p.sums)[blockIdx.x] = sum;
}
