// Stream-K scheduling of MLA decode: work tiles of (request, row tile), found from the lengths on the device.
#pragma once
#include <climits>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../common/wgmma.cuh"
#include "KernelConstants.h"
#include "PagedMlaDecodeParams.h"

namespace paged_mla_decode {

using Params = PagedMlaDecodeParams;

// Build: -DROWS=n query rows (tokens x heads) of a CTA, -DBOX_COLUMNS=n columns of a TMA box, -DTILE_TOKENS=n keys of a
// KV tile.
constexpr int COLUMNS = LATENT + MLA_ROPE_COLUMNS;  // of a key
constexpr int TILE_TOKENS_LOG2 = 6;
static_assert(TILE_TOKENS == 1 << TILE_TOKENS_LOG2);
constexpr int ROW_BYTES_LOG2 = (BOX_COLUMNS == 128 ? 7 : 6) + !KV_E4M3;  // of a token in a box
constexpr int CONSUMERS = ROWS == 64 ? 256 : LATENT / 2;  // threads that hold the output

// Shared memory of each consumer warp for the merge, reused once all KV tiles are processed: the weight of each of 16
// rows for each split of an output tile.
constexpr int MERGE_BYTES = MLA_MAX_SPLITS * 16 * sizeof(float);

// Below every maximum that counts; finite, so that the difference of two of them is 0 and not NaN.
constexpr float LOWEST = -1e30f;
constexpr float MAXIMUM_SLACK = 8.f;  // base-2 exponent by which a score may exceed the row maximum in use

DEVICE void wait_barrier(uint64_t& barrier, uint32_t phase) { mbarrier_wait(shared_address(&barrier), phase); }

// Position in a pipeline of COUNT stages; `phase` is that of the full barriers.
template <int COUNT>
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;
    DEVICE void advance() {
        if (++index == COUNT) index = 0, phase ^= 1;
    }
};

// ---------------------------------------------------------------- requests

struct Request {
    int kv_len, kv_tiles;
    int q_begin, q_len, row_tiles;
};

DEVICE int clamped_kv_len(const Params& p, int request) {
    return min(max(static_cast<const int*>(p.seq_lens)[request], 0), p.max_seq_len);
}

// A request without keys still owns one empty tile, whose CTA writes its output.
DEVICE int kv_tile_count(int kv_len) { return max(1, (kv_len + TILE_TOKENS - 1) / TILE_TOKENS); }

DEVICE int row_tile_count(const Params& p, int q_len) { return (q_len * p.heads + ROWS - 1) / ROWS; }

DEVICE Request load_request(const Params& p, int request) {
    Request r;
    r.kv_len = clamped_kv_len(p, request);
    r.kv_tiles = kv_tile_count(r.kv_len);
    r.q_begin = request * p.q_len;
    r.q_len = p.q_len;
    if (p.q_cu_seq_lens != nullptr) {
        const int* edges = static_cast<const int*>(p.q_cu_seq_lens) + request;
        r.q_begin = min(max(edges[0], 0), p.tokens);
        r.q_len = min(max(min(edges[1], p.tokens) - r.q_begin, 0), p.q_len);
    }
    r.row_tiles = row_tile_count(p, r.q_len);
    return r;
}

// x / cta_group_size, for x below 2^14.
DEVICE int divide_by_group_size(const Params& p, int x) {
    static_assert(MLA_MAX_CTA_GROUP == 4, "of 1 to 4");
    return x * (p.cta_group_size == 3 ? 21846 : 65536 >> p.cta_group_size / 2) >> 16;
}

// Groups of `cta_group_size` row tiles.
DEVICE int tile_groups_of(const Params& p, int row_tiles) {
    return divide_by_group_size(p, row_tiles + p.cta_group_size - 1);
}

// Called by `threads` threads with their numbers.
DEVICE void report_invalid_lengths(const Params& p, int thread, int threads) {
    uint32_t seen = 0;
    for (int b = thread; b < p.batch; b += threads) {
        const int kv_len = static_cast<const int*>(p.seq_lens)[b];
        if (kv_len > p.max_seq_len) seen |= STATUS_LENGTH_OVER_BOUND;
        if (kv_len < 0) seen |= STATUS_LENGTH_NEGATIVE;
        if (p.q_cu_seq_lens != nullptr) {
            const int* edges = static_cast<const int*>(p.q_cu_seq_lens) + b;
            if (edges[0] < 0 || edges[1] < edges[0] || edges[1] > p.tokens || edges[1] - edges[0] > p.q_len)
                seen |= STATUS_QUERIES;
        }
    }
    if (seen) atomicOr(static_cast<uint32_t*>(p.status), seen);
}

// ---------------------------------------------------------------- the stream-K tile space

// Whether the accumulators of an output tile's last split take up the earlier ones, if one CTA has all splits.
constexpr bool FOLDS = ROWS == 64 && !KV_E4M3;
constexpr int FOLDED_SPLITS = MLA_INVARIANT_SPLITS;

// A work tile: KV tiles [first, last) of a (request, row tile), and where its partial goes if those are not all.
struct WorkTile {
    int request, row_tile, kv_len;
    int q_begin, q_len, rows;  // rows of the row tile that exist
    int first, last;
    int split, splits;  // number of this split and count of all, for the output tile
    int slot;  // of split 0's partial, see slot_of
    int counter;  // -1: this CTA has all splits of the output tile, FOLDED_SPLITS at most

    DEVICE bool whole() const { return splits == 1; }
    DEVICE int key_tiles() const { return kv_len > 0 ? last - first : 0; }  // KV tiles that hold keys
    DEVICE int valid(int tile) const { return min(kv_len - tile * TILE_TOKENS, TILE_TOKENS); }
};

// A position in the tile space.
struct SpacePosition {
    int tile, request, request_offset;  // the request that the tile belongs to, and the index of its first tile
};

// The CTA group's contiguous range of the tile space, and the first work tile. One warp finds it for all: the code runs
// once, and is fetched from DRAM.
struct WorkRange {
    int cta_group, cta_rank;  // the CTA is number `cta_rank` of the `cta_group_size` CTAs of its group
    int end;  // end of the range in the tile space
    int cta_groups;  // that have any tiles
    int quotient, remainder;  // of all tiles divided by CTA groups
    float reciprocal;  // of cta_groups
    SpacePosition next;  // after the first work tile
    bool any;  // whether there is a first work tile
    WorkTile work;

    // Where a CTA group's range begins: floor(cta_group x tiles / cta_groups) in 32 bits, for up to 2^10 groups.
    DEVICE int begin_of(int cta_group) const {
        return cta_group * quotient + static_cast<int>((cta_group * remainder + 0.5f) * reciprocal);
    }
    // The CTA group that computes a tile. The estimate is off by one at most.
    DEVICE int cta_group_of(int tile) const {
        const float tiles = quotient + remainder * reciprocal;
        const int cta_group = min(static_cast<int>(__fdividef(tile + 0.5f, tiles)), cta_groups - 1);
        return cta_group + (cta_group + 1 < cta_groups && begin_of(cta_group + 1) <= tile) -
               (begin_of(cta_group) > tile);
    }
};

// The splits of an output tile of so many KV tiles, where `p.splits` bounds them: so large that merging costs little.
// The count never falls when tiles are added, so a bound on the tiles bounds it.
DEVICE int split_count(const Params& p, int tiles) {
    return min(p.splits, (tiles + MLA_SPLIT_TILES - 1) / MLA_SPLIT_TILES);
}

DEVICE int cta_index(const Params& p, const WorkRange& range, int cta_group) {
    return cta_group * p.cta_group_size + range.cta_rank;
}

// The work tile at a position before the end of the range, and the position after it; false if there is none.
DEVICE bool find_work_tile(const Params& p, const WorkRange& range, SpacePosition& at, WorkTile& work) {
    while (at.tile < range.end) {
        const Request r = load_request(p, at.request);
        const int tile_groups = tile_groups_of(p, r.row_tiles);
        if (at.tile - at.request_offset >= r.kv_tiles * tile_groups) {
            at.request_offset += r.kv_tiles * tile_groups;
            ++at.request;
            continue;
        }
        const int tile_group = static_cast<uint32_t>(at.tile - at.request_offset) / static_cast<uint32_t>(r.kv_tiles);
        const int space_offset = at.request_offset + tile_group * r.kv_tiles;
        const int local = at.tile - space_offset;
        work.request = at.request;
        work.row_tile = tile_group * p.cta_group_size + range.cta_rank;
        work.kv_len = r.kv_len;
        work.q_begin = r.q_begin;
        work.q_len = r.q_len;
        work.rows = min(ROWS, r.q_len * p.heads - work.row_tile * ROWS);
        if (p.splits == 0) {
            work.first = local;
            work.last = min(r.kv_tiles, local + range.end - at.tile);
            at.tile += work.last - work.first;
            const int first_group = range.cta_group_of(space_offset),
                      last_group = range.cta_group_of(space_offset + r.kv_tiles - 1);
            work.split = range.cta_group - first_group;
            work.splits = last_group - first_group + 1;
            // Of a CTA's two slots, the odd one holds a partial that begins an output tile, the even one
            // any other.
            work.slot = PARTIALS_PER_CTA * cta_index(p, range, first_group) + 1;
            work.counter = cta_index(p, range, first_group);
        } else {
            work.splits = split_count(p, r.kv_tiles);
            work.split = (local * work.splits + r.kv_tiles - 1) / r.kv_tiles;
            work.first = work.split * r.kv_tiles / work.splits;
            work.last = (work.split + 1) * r.kv_tiles / work.splits;
            if (work.split == work.splits) {  // the previous CTA group has the last split
                at.tile = space_offset + r.kv_tiles;
                continue;
            }
            if (space_offset + work.first >= range.end) break;
            at.tile = space_offset + work.last;
            work.counter = work.request * row_tile_count(p, p.q_len) + work.row_tile;
            work.slot = work.counter * p.splits;
            if (FOLDS && work.splits <= FOLDED_SPLITS && space_offset >= range.begin_of(range.cta_group) &&
                space_offset + (work.splits - 1) * r.kv_tiles / work.splits < range.end)
                work.counter = -1;
        }
        if (work.rows > 0) return true;
    }
    return false;
}

DEVICE int tiles_of(const Params& p, int request) {
    if (request >= p.batch) return 0;
    const Request r = load_request(p, request);
    return r.kv_tiles * tile_groups_of(p, r.row_tiles);
}

// Called by one warp.
DEVICE void find_work_range(const Params& p, WorkRange& to) {
    const int lane = threadIdx.x % 32;
    WorkRange range;
    range.cta_group = divide_by_group_size(p, blockIdx.x);
    range.cta_rank = blockIdx.x - range.cta_group * p.cta_group_size;
    range.any = false;
    int total = 0;
#pragma unroll 4
    for (int base = 0; base < p.batch; base += 32) total += tiles_of(p, base + lane);
    total = __reduce_add_sync(~0u, total);
    range.cta_groups = min(divide_by_group_size(p, gridDim.x), total);
    if (range.cta_group < range.cta_groups) {
        range.quotient = static_cast<uint32_t>(total) / static_cast<uint32_t>(range.cta_groups);
        range.remainder = total - range.quotient * range.cta_groups;
        range.reciprocal = __fdividef(1.f, range.cta_groups);
        range.end = range.begin_of(range.cta_group + 1);
        SpacePosition at{range.begin_of(range.cta_group), 0, 0};
#pragma unroll 1
        for (;; at.request += 32) {
            const int own = tiles_of(p, at.request + lane), all = __reduce_add_sync(~0u, own);
            if (at.request_offset + all <= at.tile) {
                at.request_offset += all;
                continue;
            }
            int through = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, through, step);
                if (lane >= step) through += other;
            }
            const int winner = __ffs(__ballot_sync(~0u, at.request_offset + through > at.tile)) - 1;
            at.request += winner;
            at.request_offset += __shfl_sync(~0u, through - own, winner);
            break;
        }
        range.any = find_work_tile(p, range, at, range.work);
        range.next = at;
    }
    if (lane == 0) to = range;
}

// Iterates over the work tiles of a range in order; every warp iterates alike.
struct WorkTileIterator {
    const Params& p;
    const WorkRange& range;
    SpacePosition at;

    DEVICE WorkTileIterator(const Params& params, const WorkRange& own) : p(params), range(own), at{0, -1, 0} {}

    DEVICE bool next(WorkTile& work) {
        if (at.request >= 0) return find_work_tile(p, range, at, work);
        at = range.next;
        work = range.work;
        return range.any;
    }
};

DEVICE float softmax_scale_log2(const Params& p) {
    const float* factor = static_cast<const float*>(p.softmax_scale_device);
    return factor == nullptr ? p.softmax_scale_log2 : p.softmax_scale_log2 * *factor;
}

DEVICE int64_t row_offset(const WorkTile& work, int row, int heads, int64_t token_stride, int64_t head_stride) {
    const int request_row = work.row_tile * ROWS + row;
    return (work.q_begin + request_row / heads) * token_stride + request_row % heads * head_stride;
}

DEVICE int slot_step(const Params& p) { return p.splits > 0 ? 1 : PARTIALS_PER_CTA * p.cta_group_size; }

DEVICE int slot_of(const Params& p, const WorkTile& work, int split) {
    return work.slot + split * slot_step(p) - (p.splits == 0 && split > 0);
}

// ---------------------------------------------------------------- masks

// Bit j: the row sees draft token j of its request.
DEVICE uint32_t visible_drafts(const Params& p, const WorkTile& work, int row) {
    const int request_row = work.row_tile * ROWS + row;
    const int token = min(request_row / p.heads, work.q_len - 1);
    if (token + work.kv_len < work.q_len) return 0;  // more queries than keys: this one comes before all keys
    const uint32_t draft = (1u << work.q_len) - 1;
    if (p.mask == nullptr) return ((2u << token) - 1) & draft;
    return static_cast<const uint32_t*>(p.mask)[work.q_begin + token] & draft;
}

}  // namespace paged_mla_decode
