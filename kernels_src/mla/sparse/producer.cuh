// Producer warps of the sparse kernel in clusters: the rows that a list names, and queries, into the pipeline.
#pragma once
#include "../few_rows/queries.cuh"
#include "cluster_tiles.cuh"
#include "lists.cuh"

namespace paged_mla_decode {

constexpr int OWN_ROWS = TILE_TOKENS / PRODUCER_WARPS;  // of a tile, that a warp copies
static_assert(OWN_ROWS == RING_SHARE);

// Rows that a warp has in flight at most beside those of its stage before, where this many CTAs share a few output
// tiles, one each. While most multiprocessors read, longer queues only let some of them, which share their way to L2
// with fewer others, end sooner.
constexpr int ROWS_IN_FLIGHT = SCALED ? OWN_ROWS : 4, BUSY_CTAS = 96;

DEVICE bool limits_in_flight(const Params& p) {
    return ROWS == 16 && gridDim.x > 1 && gridDim.x * gridDim.y >= BUSY_CTAS &&
           gridDim.y == p.batch * row_tile_count(p, 1);
}

// Neighbouring warps fill every second stage.
DEVICE void load(const Params& p, SharedStorage& shared) {
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_PRODUCER_THREAD) / 32, 0), lane = threadIdx.x % 32;
    const int half = warp / STAGE_WARPS, first = warp * OWN_ROWS;
    const uint64_t policy = row_l2_policy(p);
    PipelineState<STAGES> kv_state;
    kv_state.advance(half);
    const bool limited = limits_in_flight(p);
    PipelineState<STAGES> before;  // the stage of the warp's copies before, if `in_flight`
    bool in_flight;
    bool first_tile = true;  // whose queries QK warps copy
    const auto begin = [&](const WorkTile& work) {
        if (half < QUERY_STAGES && !first_tile) {
            wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
            copy_queries(p, work, shared_address(shared.stages[kv_state.index]),
                         shared_address(&shared.full[kv_state.index]), warp);
        }
        first_tile = false;
        kv_state.advance(QUERY_STAGES);
        in_flight = false;
    };
    const auto copy = [&](uint32_t head, int count, uint32_t last) {
        const int own = copied_rows(min(max(count - first, 0), OWN_ROWS));
        const uint32_t full = shared_address(&shared.full[kv_state.index]);
        wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
        if (lane == 0) {
            if (warp % STAGE_WARPS == 0) shared.tile[kv_state.index] = count | last;
            mbarrier_arrive_expect_bytes(full, own * ROW_BYTES);
        }
        __syncwarp();
        const uint32_t addresses = shared_address(&shared.rows_to_copy[(head + first) % ROW_RING]);
        const uint32_t to = shared_address(shared.stages[kv_state.index]) + warp % STAGE_WARPS * OWN_ROWS * KEY_PITCH;
        const int at_once = in_flight ? min(own, ROWS_IN_FLIGHT) : own;
        copy_rows(addresses, at_once, to, full, policy);
        if (in_flight) {
            wait_barrier(shared.full[before.index], before.phase);
            copy_rows(addresses + at_once * 8, own - at_once, to + at_once * KEY_PITCH, full, policy);
        }
        before = kv_state, in_flight = limited;
        __syncwarp();
        kv_state.advance(STAGES_OF_TILE);
    };
    walk_lists<PRODUCER_WARPS>(
        p, ClusterTileIterator(p), shared.rows_to_copy, warp, [] { Start::wait<Start::PRODUCER>(); }, begin, copy);
}

}  // namespace paged_mla_decode
