// Producer warps of the sparse kernel: queries, and the rows that a list names, into the pipeline.
#pragma once
#include "../few_rows/queries.cuh"

namespace paged_mla_decode {

constexpr int OWN_ROWS = TILE_TOKENS / PRODUCER_WARPS;  // of a tile, that a warp copies
constexpr int LIST_AHEAD = 1024;  // entries of a list, which a warp brings to L1 at a time: a line for each lane

// Rows that only this CTA reads must not displace lists, partials and code from L2.
DEVICE uint64_t row_l2_policy(const Params& p) {
    return p.cta_group_size == 1 ? l2_policy<L2Policy::evict_first>() : l2_policy<L2Policy::evict_unchanged>();
}

DEVICE void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

DEVICE void report_invalid_slot(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

DEVICE const void* row_address(const Params& p, uint32_t slot) {
    const uint32_t page = slot >> p.page_size_log2, row = slot & ((1u << p.page_size_log2) - 1);
    return static_cast<const char*>(p.kv_cache) + page * p.page_bytes + row * p.row_bytes;
}

// Copies `count` rows, whose slots begin at `head` of the warp's ring, as a tile. Each warp copies some of them.
DEVICE void copy_tile(const Params& p, SharedStorage& shared, PipelineState<STAGES>& kv_state, int warp, int head,
                      int count, uint32_t last, uint64_t policy) {
    const int lane = threadIdx.x % 32, row = warp * OWN_ROWS + lane;
    const int own = min(max(count - warp * OWN_ROWS, 0), OWN_ROWS);
    const uint32_t full = shared_address(&shared.full[kv_state.index]);
    wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
    if (lane == 0) {
        if (warp == 0) shared.tile[kv_state.index] = count | last;
        mbarrier_arrive_expect_bytes(full, own * ROW_BYTES);
    }
    __syncwarp();
    if (lane < own)
        bulk_copy(shared_address(shared.stages[kv_state.index]) + row * KEY_PITCH,
                  row_address(p, shared.slots[warp][(head + row) % SLOT_RING]), ROW_BYTES, full, policy);
    __syncwarp();
    kv_state.advance();
}

// Entries of a list that name a row are put together before they are copied, in the list's order, so that only the last
// tile of a work tile has fewer than TILE_TOKENS keys and holes cost no more than the reading of the list.
DEVICE void load(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_PRODUCER_THREAD) / 32, 0), lane = threadIdx.x % 32;
    const uint64_t policy = row_l2_policy(p);
    PipelineState<STAGES> kv_state;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        const int* list = static_cast<const int*>(p.indices) + work.request * p.indices_stride;
        const int end = min(work.last * TILE_TOKENS, work.kv_len);
        const auto entry = [&](int position) { return position + lane < end ? list[position + lane] : -1; };
        // Behind the rows that are in flight, an entry that comes from DRAM takes microseconds.
        int fetched = work.first * TILE_TOKENS;
        const auto fetch = [&] {
            if (fetched + lane * 32 < end) prefetch_to_l1(list + fetched + lane * 32);
            fetched += LIST_AHEAD;
        };
        fetch();
        int next[2] = {entry(work.first * TILE_TOKENS), entry(work.first * TILE_TOKENS + 32)};
        wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
        copy_queries(p, work, shared_address(shared.stages[kv_state.index]),
                     shared_address(&shared.full[kv_state.index]), warp);
        kv_state.advance();
        int head = 0, count = 0;  // of the slots in the ring
#pragma unroll 1
        for (int position = work.first * TILE_TOKENS; position < end; position += TILE_TOKENS) {
            if (position + LIST_AHEAD >= fetched) fetch();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int slot = next[half];
                next[half] = entry(position + TILE_TOKENS + half * 32);
                if (slot >= p.rows && warp == 0) report_invalid_slot(p);
                const bool names_row = slot >= 0 && slot < p.rows;
                const uint32_t naming = __ballot_sync(~0u, names_row);
                if (names_row)
                    shared.slots[warp][(head + count + __popc(naming & ((1u << lane) - 1))) % SLOT_RING] = slot;
                count += __popc(naming);
            }
            __syncwarp();
            if (count > TILE_TOKENS) {  // then this tile is not the last
                copy_tile(p, shared, kv_state, warp, head, TILE_TOKENS, 0, policy);
                head = (head + TILE_TOKENS) % SLOT_RING;
                count -= TILE_TOKENS;
            }
        }
        copy_tile(p, shared, kv_state, warp, head, count, LAST_TILE, policy);
    }
}

DEVICE void report_invalid_lengths(const Params& p, int thread, int threads) {
    if (p.topk_lens == nullptr) return;
    uint32_t status = 0;
    for (int b = thread; b < p.batch; b += threads) {
        const int length = static_cast<const int*>(p.topk_lens)[b];
        if (length > p.width) status |= STATUS_LENGTH_OVER_BOUND;
        if (length < 0) status |= STATUS_LENGTH_NEGATIVE;
    }
    if (status) atomicOr(static_cast<uint32_t*>(p.status), status);
}

}  // namespace paged_mla_decode
