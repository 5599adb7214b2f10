// Stream-K scheduling of paged decode.
//
// An output tile is a (request, KV head, row tile). CTAs work in groups of `cta_group_size`; each CTA of a group
// computes its own output tile of a tile group, so that neighbours read the same tokens at about the same time. The KV
// tiles of all tile groups form the tile space; each CTA group has a contiguous work range of it, which is walked as
// work tiles: the part of the range that lies in one output tile.
#pragma once
#include "config.cuh"

namespace paged_decode {

DEVICE int given_kv_len(const Params& p, int request) { return static_cast<const int*>(p.seq_lens)[request]; }

DEVICE int clamped_q_offset(const Params& p, int request) {
    return min(max(static_cast<const int*>(p.q_cu_seq_lens)[request], 0), p.tokens);
}

DEVICE Request load_request(const Params& p, int index) {
    Request r;
    r.index = index;
    r.kv_len = min(max(given_kv_len(p, index), 0), p.max_seq_len);
    r.q_begin = index * p.q_len;
    r.q_len = p.q_len;
    if (p.q_cu_seq_lens != nullptr) {
        r.q_begin = clamped_q_offset(p, index);
        r.q_len = min(max(clamped_q_offset(p, index + 1) - r.q_begin, 0), p.q_len);
    }
    // A row of a draft tree may sit one position before the draft block, if its mask is empty.
    const int begin = p.window_left < 0 ? 0 : max(0, r.kv_len - r.q_len - 1 - p.window_left);
    r.first_tile = begin / TILE_TOKENS;
    r.kv_tiles = max(1, (r.kv_len + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile);
    const int rows = r.q_len * p.group;
    r.row_tiles = rows < p.min_rows || rows > p.max_rows ? 0 : (rows + ROWS - 1) / ROWS;
    return r;
}

// The query token of a row of a request and KV head, and the query head in the KV head's group. The reciprocal is exact
// for all possible rows.
struct RowCoordinates {
    int token, head;
};

DEVICE RowCoordinates coordinates_of(const Params& p, int row) {
    const uint32_t product = static_cast<uint32_t>(row) * static_cast<uint32_t>(p.group_reciprocal);
    const int token = static_cast<int>(product >> DECODE_GROUP_RECIPROCAL_BITS);
    return {token, row - token * p.group};
}

DEVICE uint32_t visible_drafts(const Params& p, const Request& r, int token) {
    if (p.mask == nullptr) return (2u << token) - 1;
    return static_cast<const uint32_t*>(p.mask)[r.q_begin + token] & ((1u << r.q_len) - 1);
}

// The first key in the sliding window of a query token.
DEVICE int window_begin(const Params& p, const Request& r, int token) {
    if (p.window_left < 0) return 0;
    return max(0, r.kv_len - r.q_len + __popc(visible_drafts(p, r, token)) - 1 - p.window_left);
}

DEVICE float device_scale(const void* factor) { return factor == nullptr ? 1.f : *static_cast<const float*>(factor); }

// A work tile: KV tiles [first, last) of one output tile, which one CTA computes.
struct WorkTile {
    Request request;
    Rows rows;
    int row_tile;
    int first, last;
    int space_offset;  // tile space index of the output tile's KV tile 0
    int split;  // number of this split, where output tiles are cut into a fixed number of splits
    int begin;  // no row sees a key before this one
};

// The end of the KV tiles that hold keys: the single tile of a request without keys is never loaded.
DEVICE int end_tile(const WorkTile& work) {
    const Request& r = work.request;
    return min(work.last, (r.kv_len + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile);
}

// The CTA group that computes a KV tile. Group c of n begins at floor(c T / n), so tile x belongs to group floor(((x +
// 1) n - 1) / T).
DEVICE int cta_group_of(const WorkRange& range, int tile) {
    if (static_cast<int64_t>(range.total) * range.cta_groups < INT32_MAX)
        return (static_cast<uint32_t>(tile + 1) * range.cta_groups - 1) / static_cast<uint32_t>(range.total);
    return static_cast<int>((static_cast<int64_t>(tile + 1) * range.cta_groups - 1) / range.total);
}

DEVICE Request request_of_lane(const Request& own, int lane) {
    const auto value_of = [&](int value) { return __shfl_sync(~0u, value, lane); };
    return {value_of(own.index),      value_of(own.kv_len),   value_of(own.q_begin),  value_of(own.q_len),
            value_of(own.first_tile), value_of(own.kv_tiles), value_of(own.row_tiles)};
}

// The CTA's equal share of an output tile that a cluster computes; it may be empty.
DEVICE WorkRange cluster_work_range(const Params& p) {
    const int row_tile = gridDim.z == p.batch ? 0 : blockIdx.z / p.batch, split = blockIdx.x;
    WorkRange range;
    range.cta_group = range.cta_rank = range.group_offset = 0;
    range.total = range.cta_groups = 1;
    range.request = load_request(p, blockIdx.z - row_tile * p.batch);
    range.tile_group = blockIdx.y * range.request.row_tiles + row_tile;
    range.first = split * range.request.kv_tiles >> p.cluster_size_log2;
    const int last = (split + 1) * range.request.kv_tiles >> p.cluster_size_log2;
    range.kv_tiles = row_tile < range.request.row_tiles ? last - range.first : -1;
    return range;
}

// Every warp finds the work range by itself from the lengths: each lane sums up an equal number of requests, then the
// search continues among the requests of one lane.
DEVICE WorkRange find_work_range(const Params& p) {
    if (p.cluster_size_log2 >= 0) return cluster_work_range(p);
    const int lane = threadIdx.x % 32;
    WorkRange range;
    range.cta_group = blockIdx.y;
    range.cta_rank = blockIdx.x;
    range.cta_groups = 0;
    int first = 0, count = p.batch;  // requests that are searched
    int begin = 0, before = 0;  // KV tiles before the range, and before those requests
#pragma unroll 1
    for (;;) {
        const int each = (count + 31) / 32;
        Request last;  // of the lane's requests
        int own = 0;
        last.kv_tiles = 1;
#pragma unroll 1  // not unrolled: the first request's lengths bring the others' with them
        for (int i = lane * each; i < min((lane + 1) * each, count); ++i) {
            last = load_request(p, first + i);
            own += last.kv_tiles * last.tile_groups(p);
        }
        int through = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        if (range.cta_groups == 0) {
            const int total = __shfl_sync(~0u, through, 31);
            range.total = total;
            range.cta_groups = max(1, min(static_cast<int>(gridDim.y), total));
            range.kv_tiles = 0;
            if (range.cta_group >= min(range.cta_groups, total)) return range;
            const int quotient = total / range.cta_groups, remainder = total - quotient * range.cta_groups;
            // floor(cta_group T / n)
            const auto begin_of = [&](int cta_group) {
                return cta_group * quotient + cta_group * remainder / range.cta_groups;
            };
            begin = begin_of(range.cta_group);
            range.kv_tiles = begin_of(range.cta_group + 1) - begin;
        }
        const int winner = __ffs(__ballot_sync(~0u, before + through > begin)) - 1;
        before += __shfl_sync(~0u, through - own, winner);
        first += winner * each;
        count = min(each, count - winner * each);
        if (each == 1) {
            range.request = request_of_lane(last, winner);
            range.tile_group = (begin - before) / range.request.kv_tiles;
            range.group_offset = before + range.tile_group * range.request.kv_tiles;
            range.first = begin - range.group_offset;
            return range;
        }
    }
}

// Short requests are cut into a few splits, so that a single one still spreads over the GPU; long ones into splits so
// large that merging costs little. The count never falls when tiles are added, so a bound on the tiles bounds it.
DEVICE int split_count(const Params& p, const Request& r) {
    constexpr int LONG = DECODE_SPLIT_TOKENS / TILE_TOKENS, MIN_SHORT = DECODE_SHORT_SPLIT_TOKENS / TILE_TOKENS;
    return min(p.splits,
               max((r.kv_tiles + LONG - 1) / LONG, min(DECODE_SHORT_SPLITS, (r.kv_tiles + MIN_SHORT - 1) / MIN_SHORT)));
}

DEVICE int split_start(const Request& r, int split, int count) {
    return static_cast<uint32_t>(split) * static_cast<uint32_t>(r.kv_tiles) / static_cast<uint32_t>(count);
}

// Calls visit(work) for each work tile of the range, in order; producers and consumers walk alike.
template <class Visit>
DEVICE void for_each_work_tile(const Params& p, const WorkRange& range, Visit visit) {
    int left = range.kv_tiles, tile_group = range.tile_group, first = range.first, group_offset = range.group_offset;
    if (left < 0 || (left == 0 && p.cluster_size_log2 < 0)) return;
    WorkTile work;
    work.split = 0;
    work.request = range.request;
    const Request& r = work.request;
    if (p.splits > 0) {
        // A split belongs to the CTA group in whose range it begins.
        const int count = split_count(p, r);
        work.split = (static_cast<uint32_t>(first) * static_cast<uint32_t>(count) + r.kv_tiles - 1) / r.kv_tiles;
        const int begin = split_start(r, work.split, count);
        left -= begin - first;
        first = begin;
        if (left <= 0) return;
    }
#pragma unroll 1
    do {
        if (first == r.kv_tiles) {
            first = work.split = 0;
            group_offset += r.kv_tiles;
            if (++tile_group == r.tile_groups(p)) {
                tile_group = 0;
                do work.request = load_request(p, r.index + 1);
                while (r.row_tiles == 0);
            }
        }
        const int output_tile = tile_group * p.cta_group_size + range.cta_rank;
        work.rows.q_begin = r.q_begin;
        work.rows.head = r.row_tiles == 1 ? output_tile : output_tile / r.row_tiles;
        work.row_tile = output_tile - work.rows.head * r.row_tiles;
        work.rows.first = work.row_tile * ROWS;
        work.rows.count = min(ROWS, r.q_len * p.group - work.rows.first);
        work.space_offset = group_offset;
        work.first = first;
        work.last = p.splits > 0 ? split_start(r, work.split + 1, split_count(p, r)) : min(r.kv_tiles, first + left);
        work.begin = 0;
        if (p.window_left >= 0) {
            work.begin = window_begin(p, r, 0);
            if (p.mask != nullptr)
#pragma unroll 1
                for (int token = 1; token < r.q_len; ++token) work.begin = min(work.begin, window_begin(p, r, token));
        }
        visit(work);
        left -= work.last - first;
        first = work.last;
        ++work.split;
    } while (left > 0);
}

}  // namespace paged_decode
