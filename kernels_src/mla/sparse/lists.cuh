// Lists of rows: their entries become tiles of rows that exist, which bulk copies bring to shared memory.
#pragma once
#include "rows.cuh"

namespace paged_mla_decode {

// Of a list, each lane has loaded its entries of so many tiles that come next.
constexpr int TILES_AHEAD = 2;
constexpr int LIST_AHEAD = 1024;  // entries of a list, which a warp brings to L2 at a time: a line for each lane

// Rows that only this CTA reads must not displace lists, partials and code from L2.
DEVICE uint64_t row_l2_policy(const Params& p) {
    return p.cta_group_size == 1 ? l2_policy<L2Policy::evict_first>() : l2_policy<L2Policy::evict_unchanged>();
}

DEVICE void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

DEVICE const void* row_address(const Params& p, uint32_t slot) {
    const uint32_t page = slot >> p.page_size_log2, row = slot & ((1u << p.page_size_log2) - 1);
    return static_cast<const char*>(p.kv_cache) + page * p.page_bytes + row * p.row_bytes;
}

// A condition for each row would take longer than its copy. Kernels for few rows, which end soon, would take longer to
// fetch code for more rows.
constexpr int ROWS_AT_ONCE = ROWS > 16 ? RING_SHARE : 4;

// How many rows are copied for `count`: whole groups.
DEVICE int copied_rows(int count) { return (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE; }

// Copies a group of rows to `stage` and on, whose addresses lie in shared memory. One lane copies all: operands of a
// bulk copy are uniform registers, so that the compiler would copy the rows of lanes one by one in a loop.
DEVICE void copy_group(bool leads, uint32_t addresses, uint32_t stage, uint32_t barrier, uint64_t policy) {
    uint4 two[ROWS_AT_ONCE / 2];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE / 2; ++i) two[i] = load_shared_uint4(addresses + i * 16);
    if (leads)
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i) {
            const uint64_t low = i % 2 ? two[i / 2].z : two[i / 2].x, high = i % 2 ? two[i / 2].w : two[i / 2].y;
            bulk_copy(stage + i * KEY_PITCH, reinterpret_cast<const void*>(high << 32 | low), ROW_BYTES, barrier,
                      policy);
        }
}

// Copies `count` rows, whole groups.
DEVICE void copy_rows(uint32_t addresses, int count, uint32_t stage, uint32_t barrier, uint64_t policy) {
    const bool leads = elect_one();
    if constexpr (ROWS_AT_ONCE == RING_SHARE) {
        if (count > 0 && leads) copy_group(true, addresses, stage, barrier, policy);
    } else {
#pragma unroll 1
        for (int row = 0; row < count; row += ROWS_AT_ONCE)
            copy_group(leads, addresses + row * 8, stage + row * KEY_PITCH, barrier, policy);
    }
}

DEVICE void report_invalid_slot(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

// Calls `begin(work)` for each work tile, then `copy(head, count, last)` for each of its tiles, whose `count` rows
// begin at `head` of the ring. Entries that name a row are put together in the list's order, so that only the last tile
// of a work tile has fewer than TILE_TOKENS keys and holes cost no more than the reading of the list. WARPS warps walk
// the same lists, each of which puts every so many-th RING_SHARE rows into the ring; one reports invalid slots. `ready`
// is called while the first entries are in flight.
template <int WARPS, class Iterator, class Ready, class Begin, class Copy>
DEVICE void walk_lists(const Params& p, Iterator work_tiles, const void** ring, int warp, Ready ready, Begin begin,
                       Copy copy) {
    const int lane = threadIdx.x % 32;
    WorkTile work;
    const int* list;
    int position, end, fetched;
    // Behind the rows that are in flight, an entry that comes from DRAM takes microseconds.
    const auto fetch = [&] {
        if (fetched + lane * 32 < end) prefetch_to_l2(list + fetched + lane * 32);
        fetched += LIST_AHEAD;
    };
    const auto entry = [&](int i) { return i + lane < end ? list[i + lane] : -1; };
    int next[TILES_AHEAD][2];  // of tiles in turn; the entries from `position` on are next[turn]
    int turn = 0;
    const auto next_work = [&] {
        if (!work_tiles.next(work)) return false;
        list = static_cast<const int*>(p.indices) + work.request * p.indices_stride;
        end = min(work.last * TILE_TOKENS, work.kv_len);
        fetched = position = work.first * TILE_TOKENS;
#pragma unroll
        for (int i = 0; i < TILES_AHEAD * 2; ++i) next[i / 2][i % 2] = entry(position + i * 32);
        turn = 0;
        fetch();
        return true;
    };
    bool more = next_work();
    int largest = -1;  // slot
    // Copies go past the last row of a work tile.
    for (int i = lane; i < ROW_RING / WARPS; i += 32)
        ring[(i / RING_SHARE * WARPS + warp) * RING_SHARE + i % RING_SHARE] = p.kv_cache;
    ready();
    __syncwarp();
    uint32_t head;  // of the rows in the ring
    int count;
    // Puts rows that entries name into the ring, and loads those of a tile later.
    const auto take = [&](int (&entries)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int slot = entries[half];
            largest = max(largest, slot);
            const bool names_row = static_cast<uint32_t>(slot) < static_cast<uint32_t>(p.rows);
            const uint32_t naming = __ballot_sync(~0u, names_row);
            const uint32_t at = head + count + __popc(naming & ((1u << lane) - 1));
            if (names_row && at / RING_SHARE % WARPS == warp) ring[at % ROW_RING] = row_address(p, slot);
            count += __popc(naming);
        }
        // after the entries of before are used: else they would be moved, which waits for these
#pragma unroll
        for (int half = 0; half < 2; ++half) entries[half] = entry(position + ((TILES_AHEAD - 1) * 2 + half) * 32);
    };
    while (more) {
        begin(work);
        head = count = 0;
#pragma unroll 1
        for (bool last = false; !last;) {
            if (count < TILE_TOKENS && position < end) {
                position += TILE_TOKENS;
                if (position + LIST_AHEAD > fetched) fetch();
                if (turn == 0)
                    take(next[0]);
                else
                    take(next[1]);
                turn ^= 1;
                __syncwarp();
                continue;
            }
            last = count <= TILE_TOKENS && position >= end;
            if (last) more = next_work();  // its entries are fetched behind the rows of this work tile
            copy(head, min(count, TILE_TOKENS), last ? LAST_TILE : 0);
            head += TILE_TOKENS;
            count -= TILE_TOKENS;
        }
    }
    if (warp == 0 && largest >= p.rows) report_invalid_slot(p);
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
