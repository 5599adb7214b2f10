// Persistent scheduling: which work tile a CTA computes next, found on the device from the lengths.
//
// Work tiles are numbered longest first. Requests come by the power of two of their key tiles, the highest first; the
// work tiles of a request in sections of head packs, whose keys stay in L2; those of a section by row tile, the last
// (with the most keys) first. CTAs take the next number from a counter, so that numbers only grow and a CTA never looks
// back: it keeps its place in the list of requests.
#pragma once
#include "config.cuh"

namespace context_attention {

struct Request {
    int q_begin, q_len, kv_begin, kv_len;
};

DEVICE int length_at(const void* lengths, int index) { return static_cast<const int*>(lengths)[index]; }

// Lengths out of bounds are clamped; STATUS bits of those that were are added to `status`.
DEVICE Request load_request(const Params& p, int index, uint32_t& status) {
    Request r;
    int q_end = (index + 1) * p.q_len;
    r.q_begin = index * p.q_len;
    if (p.q_cu_seq_lens != nullptr) {
        r.q_begin = length_at(p.q_cu_seq_lens, index);
        q_end = length_at(p.q_cu_seq_lens, index + 1);
    }
    if (r.q_begin < 0 || q_end > p.tokens || q_end < r.q_begin || q_end - r.q_begin > p.q_len) status |= STATUS_QUERIES;
    r.q_begin = min(max(r.q_begin, 0), p.tokens);
    r.q_len = min(max(min(q_end, p.tokens) - r.q_begin, 0), p.q_len);
    r.kv_begin = 0;
    int kv_len = p.kv_tokens;
    if (p.kv_cu_seq_lens != nullptr) {
        r.kv_begin = length_at(p.kv_cu_seq_lens, index);
        kv_len = length_at(p.kv_cu_seq_lens, index + 1) - r.kv_begin;
    }
    if (p.seq_lens != nullptr) kv_len = length_at(p.seq_lens, index);
    if (kv_len < 0) status |= STATUS_LENGTH_NEGATIVE;
    int bound = p.max_seq_len;
    if (p.page_table == nullptr) {
        if (r.kv_begin < 0 || r.kv_begin > p.kv_tokens) status |= STATUS_LENGTH_OVER_BOUND;
        r.kv_begin = min(max(r.kv_begin, 0), p.kv_tokens);
        bound = min(bound, p.kv_tokens - r.kv_begin);
    }
    if (kv_len > bound) status |= STATUS_LENGTH_OVER_BOUND;
    r.kv_len = min(max(kv_len, 0), bound);
    return r;
}

// Records what was clamped; by THREADS threads, of which this is one.
DEVICE void report_clamped(const Params& p, int thread, int threads) {
    uint32_t status = 0;
    for (int i = thread; i < p.batch; i += threads) load_request(p, i, status);
    if (status != 0) asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "r"(status) : "memory");
}

DEVICE int level_of(int kv_len) { return 31 - __clz((kv_len + TILE_TOKENS - 1) / TILE_TOKENS | 1); }

DEVICE int row_tiles_of(const Params& p, int q_len) { return ((q_len << p.packed_log2) + ROWS - 1) / ROWS; }

// A warp's place in the list of work tiles.
struct Schedule {
    int level, chunk = 0, passed = 0;

    DEVICE explicit Schedule(const Params& p) : level(level_of(p.max_seq_len)) {}

    // Finds the work tile `number`, which is no less than that of the last call. Returns whether there is one.
    DEVICE bool find(const Params& p, int number, WorkTile& work) {
        const int lane = threadIdx.x % 32;
        for (; level >= 0; --level, chunk = 0)
            for (; chunk < p.batch; chunk += 32) {
                Request r{};
                int count = 0;
                uint32_t status = 0;
                if (chunk + lane < p.batch) {
                    r = load_request(p, chunk + lane, status);
                    if (level_of(r.kv_len) == level) count = row_tiles_of(p, r.q_len) * p.head_packs;
                }
                int end = count;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const int other = __shfl_up_sync(~0u, end, step);
                    if (lane >= step) end += other;
                }
                const uint32_t behind = __ballot_sync(~0u, number < passed + end);
                if (behind != 0) {
                    const int owner = __ffs(behind) - 1;
                    work.request = chunk + owner;
                    work.q_begin = __shfl_sync(~0u, r.q_begin, owner);
                    work.q_len = __shfl_sync(~0u, r.q_len, owner);
                    work.kv_begin = __shfl_sync(~0u, r.kv_begin, owner);
                    work.kv_len = __shfl_sync(~0u, r.kv_len, owner);
                    place(p, number - passed - __shfl_sync(~0u, end - count, owner), work);
                    return true;
                }
                passed += __shfl_sync(~0u, end, 31);
            }
        return false;
    }

private:
    // The row tile and head pack of work tile `index` of a request, and the keys that it sees.
    DEVICE static void place(const Params& p, int index, WorkTile& work) {
        const int row_tiles = row_tiles_of(p, work.q_len);
        const int section = index / (row_tiles * p.section_packs) * p.section_packs;
        const int packs = min(p.section_packs, p.head_packs - section);
        index -= section * row_tiles;
        const int row_tile = row_tiles - 1 - index / packs;
        work.head = (section + index % packs) << p.packed_log2;
        work.token = (row_tile * ROWS) >> p.packed_log2;
        const int last_token = min(work.q_len, work.token + (ROWS >> p.packed_log2)) - 1;
        const int begin = first_visible(p, position_of(work, work.token));
        const int end = visible_end(p, work, position_of(work, last_token));
        work.first = begin / TILE_TOKENS;
        work.last = end > begin ? (end + TILE_TOKENS - 1) / TILE_TOKENS : work.first;
        if constexpr (SPLIT_KEYS) {
            const int tiles = (work.kv_len + TILE_TOKENS - 1) / TILE_TOKENS, split = blockIdx.y, splits = gridDim.y;
            work.first = max(work.first, tiles * split / splits);
            work.last = max(work.first, min(work.last, tiles * (split + 1) / splits));
        }
    }
};

// The work tiles handed out and the CTAs that are done, of those that share a split of the keys.
DEVICE uint32_t* counters_of(const Params& p) {
    return static_cast<uint32_t*>(p.counters) + (SPLIT_KEYS ? 2 * blockIdx.y : 0);
}

}  // namespace context_attention
