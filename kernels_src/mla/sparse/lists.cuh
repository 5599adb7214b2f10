// Lists of rows: their entries become tiles of rows that exist, which bulk copies bring to shared memory.
#pragma once
#include "rows.cuh"

namespace paged_mla_decode {

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

DEVICE const void* row_address(const Params& p, uint32_t slot) {
    const uint32_t page = slot >> p.page_size_log2, row = slot & ((1u << p.page_size_log2) - 1);
    return static_cast<const char*>(p.kv_cache) + page * p.page_bytes + row * p.row_bytes;
}

// Copies `count` rows of at most ROWS_AT_ONCE to `stage` and on, row i from the address that lane i gives. One lane copies
// all: operands of a bulk copy are uniform registers, so that the compiler would copy the rows of lanes one by one in a
// loop, which takes longer than the copies.
template <int ROWS_AT_ONCE>
DEVICE void copy_rows(const void* own, int count, uint32_t stage, uint32_t barrier, uint64_t policy) {
    const uint64_t address = reinterpret_cast<uint64_t>(own);
    const bool leads = elect_one();
#pragma unroll
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
        const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(address), row);
        const uint32_t high = __shfl_sync(~0u, static_cast<uint32_t>(address >> 32), row);
        if (leads && row < count)
            bulk_copy(stage + row * KEY_PITCH, reinterpret_cast<const void*>(uint64_t{high} << 32 | low), ROW_BYTES,
                      barrier, policy);
    }
}

DEVICE void report_invalid_slot(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

// Calls `begin(work)` for each work tile, then `copy(head, count, last)` for each of its tiles: `count` slots begin at
// `head` of the warp's ring. Entries that name a row are put together in the list's order, so that only the last tile of
// a work tile has fewer than TILE_TOKENS keys and holes cost no more than the reading of the list. One of the warps that
// walk the same lists reports invalid slots.
template <class Iterator, class Begin, class Copy>
DEVICE void walk_lists(const Params& p, Iterator work_tiles, int* ring, bool reports, Begin begin, Copy copy) {
    const int lane = threadIdx.x % 32;
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
        begin(work);
        int head = 0, count = 0;  // of the slots in the ring
#pragma unroll 1
        for (int position = work.first * TILE_TOKENS; position < end; position += TILE_TOKENS) {
            if (position + LIST_AHEAD >= fetched) fetch();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int slot = next[half];
                next[half] = entry(position + TILE_TOKENS + half * 32);
                if (slot >= p.rows && reports) report_invalid_slot(p);
                const bool names_row = slot >= 0 && slot < p.rows;
                const uint32_t naming = __ballot_sync(~0u, names_row);
                if (names_row) ring[(head + count + __popc(naming & ((1u << lane) - 1))) % SLOT_RING] = slot;
                count += __popc(naming);
            }
            __syncwarp();
            if (count > TILE_TOKENS) {  // then this tile is not the last
                copy(head, TILE_TOKENS, 0);
                head = (head + TILE_TOKENS) % SLOT_RING;
                count -= TILE_TOKENS;
            }
        }
        copy(head, count, LAST_TILE);
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
