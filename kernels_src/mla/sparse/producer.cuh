// Producer warps of the sparse kernel: queries, and the rows that a list names, into the pipeline.
#pragma once
#include "../few_rows/queries.cuh"

namespace paged_mla_decode {

constexpr int OWN_ROWS = TILE_TOKENS / PRODUCER_WARPS;  // of a tile, that a warp copies

DEVICE void report_invalid_slot(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

DEVICE const void* row_address(const Params& p, uint32_t slot) {
    const uint32_t page = slot >> p.page_size_log2, row = slot & ((1u << p.page_size_log2) - 1);
    return static_cast<const char*>(p.kv_cache) + page * p.page_bytes + row * p.row_bytes;
}

// Copies `count` rows, whose slots begin at `head` of the warp's ring, as a tile. Each warp copies some of them.
DEVICE void copy_tile(const Params& p, SharedStorage& shared, PipelineState<STAGES>& kv_state, int warp, int head,
                      int count, uint32_t last) {
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
                  row_address(p, shared.slots[warp][(head + row) % SLOT_RING]), ROW_BYTES, full);
    __syncwarp();
    kv_state.advance();
}

// Entries of a list that name a row are put together before they are copied, in the list's order, so that only the last
// tile of a work tile has fewer than TILE_TOKENS keys and holes cost no more than the reading of the list.
DEVICE void load(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int warp = __shfl_sync(~0u, (threadIdx.x - FIRST_PRODUCER_THREAD) / 32, 0), lane = threadIdx.x % 32;
    PipelineState<STAGES> kv_state;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        const int* list = static_cast<const int*>(p.indices) + work.request * p.indices_stride;
        const int end = min(work.last * TILE_TOKENS, work.kv_len);
        const auto entry = [&](int position) { return position + lane < end ? list[position + lane] : -1; };
        int next[2] = {entry(work.first * TILE_TOKENS), entry(work.first * TILE_TOKENS + 32)};
        wait_barrier(shared.empty[kv_state.index], kv_state.phase ^ 1);
        copy_queries(p, work, shared_address(shared.stages[kv_state.index]),
                     shared_address(&shared.full[kv_state.index]), warp);
        kv_state.advance();
        int head = 0, count = 0;  // of the slots in the ring
#pragma unroll 1
        for (int position = work.first * TILE_TOKENS; position < end; position += TILE_TOKENS) {
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
                copy_tile(p, shared, kv_state, warp, head, TILE_TOKENS, 0);
                head = (head + TILE_TOKENS) % SLOT_RING;
                count -= TILE_TOKENS;
            }
        }
        copy_tile(p, shared, kv_state, warp, head, count, LAST_TILE);
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
