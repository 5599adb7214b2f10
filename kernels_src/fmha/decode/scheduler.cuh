// Work tiles of paged decode, cut by (KV head, row tile), with sliding windows and draft tokens; scheduled by
// common/stream_k.cuh, or as clusters.
#pragma once
#include "../../common/context_parallel.cuh"
#include "config.cuh"

namespace paged_decode {

struct DecodeTiling;

#if SEGMENTS
// The segments of common/segments.cuh; the first may begin in its middle, where a window leaves out the keys before.
struct Splits {
    static constexpr bool JOINS_SPLITS = true;
    static constexpr int SEGMENT_TILES = SEGMENT_TOKENS / TILE_TOKENS;

    DEVICE static int split_count(const Params& p, const Request& r) { return split_from(p, r, r.kv_tiles); }

    DEVICE static int split_start(const Params&, const Request& r, int split) {
        const int begin = (r.first_tile / SEGMENT_TILES + split) * SEGMENT_TILES - r.first_tile;
        return min(max(begin, 0), r.kv_tiles);
    }

    DEVICE static int split_from(const Params&, const Request& r, int tile) {
        if (tile == 0) return 0;
        return (r.first_tile + tile + SEGMENT_TILES - 1) / SEGMENT_TILES - r.first_tile / SEGMENT_TILES;
    }
};
#else
using Splits = stream_k::EqualSplits<DecodeTiling>;
#endif

// How paged decode cuts requests; see common/stream_k.cuh.
struct DecodeTiling : Splits {
    DEVICE static Request load_request(const Params& p, int index) {
        Request r = stream_k::load_lengths(p, index);
        // A row of a draft tree may sit one position before the draft block, if its mask is empty.
        int begin = p.window_left < 0 ? 0 : max(0, r.kv_len - r.q_len - 1 - p.window_left);
        if (p.window_left >= 0 && context_parallel::is_on(p)) {
            const int window = min(context_parallel::keys_before(p, index, r.q_len, 0, p.window_left), r.kv_len);
            // Lengths that contradict each other must not give a request more segments than have room for partials.
            begin = SEGMENTS ? max(begin, window) : window;
        }
        r.first_tile = begin / TILE_TOKENS;
        r.kv_tiles = max(1, (r.kv_len + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile);
        const int rows = r.q_len * p.group;
        r.row_tiles = rows < p.min_rows || rows > p.max_rows ? 0 : (rows + ROWS - 1) / ROWS;
        return r;
    }

    // Where the CTAs of clusters divide the tile space, a group lies within a cluster if its size allows that, and the
    // groups of a cluster lie far apart: then row tiles that read the same keys do so at the same time.
    DEVICE static bool groups_in_clusters(const Params& p) {
        const int size = p.cta_group_size;
        return (size & (size - 1)) == 0 && size <= static_cast<int>(gridDim.x);  // which is a power of two
    }
    DEVICE static int cta_group(const Params& p) {
        if (!groups_in_clusters(p)) return blockIdx.x * gridDim.z + blockIdx.z;
        const int of_cluster = blockIdx.x >> (31 - __clz(p.cta_group_size));
        return of_cluster * (gridDim.y * gridDim.z) + blockIdx.z * gridDim.y + blockIdx.y;
    }
    DEVICE static int cta_rank(const Params& p) {
        return groups_in_clusters(p) ? blockIdx.x & (p.cta_group_size - 1) : blockIdx.y;
    }
    DEVICE static int cta_groups(const Params&) { return gridDim.z * gridDim.x; }

    DEVICE static int tile_groups(const Params& p, const Request& r) { return p.head_groups * r.row_tiles; }

    DEVICE static int useful_groups(const Params&, int, int, int groups) { return groups; }

    DEVICE static bool keeps_whole(const Params&, int, int) { return false; }

    static constexpr bool CUTS_PIECES = false;
    DEVICE static int longest_piece(const Params&, int, int, int) { return 0; }

    // A cluster that has an output tile for itself starts and merges sooner, but cannot help the others.
    DEVICE static bool in_clusters(const Params& p, int longest, int share) {
        const int log2 = p.cluster_size_log2;
        return log2 >= 0 && (longest + (1 << log2) - 1) >> log2 <= share + p.slack_tiles;
    }

#if !SEGMENTS
    // Short requests are cut into a few splits, so that a single one still spreads over the GPU; long ones into splits
    // so large that merging costs little. The count never falls when tiles are added, so a bound on the tiles bounds
    // it.
    DEVICE static int split_count(const Params& p, const Request& r) {
        constexpr int LONG = DECODE_SPLIT_TOKENS / TILE_TOKENS, MIN_SHORT = DECODE_SHORT_SPLIT_TOKENS / TILE_TOKENS;
        return min(p.splits, max((r.kv_tiles + LONG - 1) / LONG,
                                 min(DECODE_SHORT_SPLITS, (r.kv_tiles + MIN_SHORT - 1) / MIN_SHORT)));
    }
#endif

    DEVICE static int max_row_tiles(const Params& p) { return (min(p.q_len * p.group, p.max_rows) + ROWS - 1) / ROWS; }

    DEVICE static int output_tile_index(const Params& p, const WorkTile& work, int row_tiles) {
        return (work.request.index * row_tiles + work.row_tile) * p.kv_heads + work.rows.head;
    }
};

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

DEVICE DraftMask masked_drafts(const Params& p, const Request& r, int token) {
    if (p.mask == nullptr) return first_drafts(token + 1);
    const uint32_t* words = static_cast<const uint32_t*>(p.mask);
    const int index = r.q_begin + token;
    const DraftMask drafts = p.q_len <= 32 ? words[index] : words[2 * index] | DraftMask{words[2 * index + 1]} << 32;
    return drafts & first_drafts(r.q_len);
}

// Which of the request's last q_len keys a query token sees.
DEVICE DraftMask visible_drafts(const Params& p, const Request& r, int token) {
    if (!context_parallel::is_on(p)) return masked_drafts(p, r, token);
    return first_drafts(context_parallel::visible_count(p, r.index, r.kv_len, r.q_len, token));
}

// The first key in the sliding window of a query token.
DEVICE int window_begin(const Params& p, const Request& r, int token) {
    if (p.window_left < 0) return 0;
    if (context_parallel::is_on(p)) return context_parallel::keys_before(p, r.index, r.q_len, token, p.window_left);
    const bool by_index = p.positions_by_index || p.mask == nullptr;
    const int place = by_index ? token : __popcll(masked_drafts(p, r, token)) - 1;
    return max(0, r.kv_len - r.q_len + place - p.window_left);
}

// Query tokens in front of all keys see none, not even their own; other ranks may have keys in front of this rank's.
DEVICE bool follows_keys(const Params& p, const Request& r, int token) {
    return token >= r.q_len - r.kv_len || context_parallel::is_on(p);
}

// Every query token sees the keys from here to the last q_len ones.
DEVICE int visible_to_all_from(const Params& p, const Request& r) {
    if (p.window_left < 0) return 0;
    if (context_parallel::is_on(p)) return context_parallel::keys_before(p, r.index, 1, 0, p.window_left);
    return r.kv_len - 1 - p.window_left;
}

#if SEGMENTS
// Whether every row sees all keys of the tile that begins at key `token`.
DEVICE bool all_rows_see(const Params& p, const Request& r, int token) {
    // To find where a window of divided keys begins takes registers that are not there: all its tiles have masks.
    const bool is_divided = p.window_left >= 0 && context_parallel::is_on(p);
    const int begin = p.window_left < 0 ? 0 : r.kv_len - 1 - p.window_left;
    return !is_divided && token >= begin && token + TILE_TOKENS <= r.kv_len - r.q_len;
}
#endif

DEVICE float device_scale(const void* factor) { return factor == nullptr ? 1.f : *static_cast<const float*>(factor); }

// The factors of scores and output that a work tile has beside those of the launch.
#if KV_E4M3
DEVICE float key_scale(const Params& p, const WorkTile& work) {
    if (p.k_scale == nullptr) return 1.f;
    return static_cast<const float*>(
        p.k_scale)[work.request.index * p.k_scale_request_stride + work.rows.head * p.k_scale_head_stride];
}
DEVICE float value_scale(const Params& p, const WorkTile& work) {
    if (p.v_scale == nullptr) return 1.f;
    return static_cast<const float*>(
        p.v_scale)[work.request.index * p.v_scale_request_stride + work.rows.head * p.v_scale_head_stride];
}
#endif

// The end of the KV tiles that hold keys: the single tile of a request without keys is never loaded.
DEVICE int end_tile(const WorkTile& work) {
    const Request& r = work.request;
    return min(work.last, (r.kv_len + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile);
}

// The CTA's equal share of an output tile that a cluster computes; it may be empty. Clusters beyond those of all output
// tiles idle.
DEVICE WorkRange cluster_work_range(const Params& p) {
    const int row_tile = gridDim.z == p.batch ? 0 : blockIdx.z / p.batch, split = blockIdx.x;
    WorkRange range;
    range.cta_group = range.cta_groups = range.tile_group = range.group_offset = 0;
    range.total = 1;
    range.request = DecodeTiling::load_request(p, blockIdx.z - row_tile * p.batch);
    range.whole = range.request.kv_tiles <= 1;
    range.cta_rank = blockIdx.y * range.request.row_tiles + row_tile;  // of a tile group that is all its output tiles
    range.first = split * range.request.kv_tiles >> p.cluster_size_log2;
    const int last = (split + 1) * range.request.kv_tiles >> p.cluster_size_log2;
    range.kv_tiles = row_tile < range.request.row_tiles ? last - range.first : -1;
    return range;
}

// Every warp finds the work range by itself. The clusters of a single request have no choice where there are no others.
DEVICE WorkRange find_work_range(const Params& p) {
    WorkRange range;
    range.cta_groups = 0;
    if (p.cluster_size_log2 < 0 || static_cast<int>(gridDim.z) > DecodeTiling::max_row_tiles(p))
        range = stream_k::find_work_range<DecodeTiling>(p);
    if (range.cta_groups == 0) range = cluster_work_range(p);
    return range;
}

// Whether an output tile's partials lie in the shared memory of the CTA's cluster; a single KV tile is not split.
DEVICE bool merges_in_cluster(const Params& p, const WorkRange& range) {
    return p.cluster_size_log2 > 0 && range.cta_groups == 0 && !range.whole;
}

// Calls visit(work) for each work tile of the range, in order; producers and consumers walk alike.
template <class Visit>
DEVICE void for_each_work_tile(const Params& p, const WorkRange& range, Visit visit) {
    stream_k::RangeWalk<DecodeTiling, WorkTile> walk(range);
    // A CTA of a cluster visits its work tile even if its share is empty, as the others wait for it.
    if (walk.left < 0 || (walk.left == 0 && !merges_in_cluster(p, range))) return;
    if (!walk.begin(p, range)) return;
    WorkTile& work = walk.work;
    const Request& r = work.request;
#pragma unroll 1
    do {
        if (!walk.find_output_tile(p, range)) break;
        work.rows.q_begin = r.q_begin;
        work.rows.head = r.row_tiles == 1 ? work.output_tile : work.output_tile / r.row_tiles;
        work.row_tile = work.output_tile - work.rows.head * r.row_tiles;
        work.rows.first = work.row_tile * ROWS;
        work.rows.count = min(ROWS, r.q_len * p.group - work.rows.first);
        walk.find_kv_tiles(p, range);
        work.begin = 0;
        if (p.window_left >= 0) {
            work.begin = window_begin(p, r, 0);
            if (p.mask != nullptr)
#pragma unroll 1
                for (int token = 1; token < r.q_len; ++token) work.begin = min(work.begin, window_begin(p, r, token));
        }
        visit(work);
        walk.advance();
    } while (walk.left > 0);
}

#if SEGMENTS
// Where partials of the segments lie in the workspace: a CTA has `splits` slots, the first for what it folded from
// segment 0 on, the others for the segments of the output tile in whose middle its range begins.
DEVICE int first_slot(const Params& p, const WorkRange& range, int cta_group) {
    return (cta_group * p.cta_group_size + range.cta_rank) * p.splits;
}

// Walks the partials of an output tile in the order of their segments.
struct PartialWalk {
    const Params& p;
    const Request& request;
    int space_offset, rank, groups, quotient, remainder;
    int cta_group, next_begin, rest;  // a CTA group, and floor(c T / n) of the next with what the division leaves
    int segment = 0, from = 0, to;  // the next segment; those of `cta_group` are [from, to)

    DEVICE PartialWalk(const Params& p, const WorkRange& range, const WorkTile& work)
        : p(p), request(work.request), space_offset(work.space_offset), rank(range.cta_rank), groups(range.cta_groups),
          quotient(range.total / groups), remainder(range.total - quotient * groups),
          cta_group(stream_k::cta_group_of(range, work.space_offset)) {
        next_begin = (cta_group + 1) * quotient + (cta_group + 1) * remainder / groups;
        rest = (cta_group + 1) * remainder % groups;
        find_end();
    }

    DEVICE void find_end() {
        to = DecodeTiling::split_from(p, request, min(next_begin - space_offset, request.kv_tiles));
    }

    // -1: there is none left.
    DEVICE int next_slot() {
        const int base = (cta_group * p.cta_group_size + rank) * p.splits;
        if (segment == 0) {
            segment = to;
            return base;
        }
        if (DecodeTiling::split_start(p, request, segment) >= request.kv_tiles) return -1;
        while (segment == to) {
            ++cta_group;
            next_begin += quotient;
            rest += remainder;
            if (rest >= groups) rest -= groups, ++next_begin;
            from = segment;
            find_end();
        }
        return (cta_group * p.cta_group_size + rank) * p.splits + 1 + segment++ - from;
    }
};

// The same for lanes that ask for a partial each; one after the other, a walk is faster.
struct Partials {
    const Params& p;
    const WorkRange& range;
    const WorkTile& work;
    int cta_group;  // that of the first partial, which holds the segments before `joined`
    int joined, count;

    DEVICE Partials(const Params& p, const WorkRange& range, const WorkTile& work)
        : p(p), range(range), work(work), cta_group(stream_k::cta_group_of(range, work.space_offset)),
          joined(segments_before(cta_group + 1)), count(1 + DecodeTiling::split_count(p, work.request) - joined) {}

    // Those of the output tile that begin before a CTA group's range.
    DEVICE int segments_before(int group) const {
        const int quotient = range.total / range.cta_groups, remainder = range.total - quotient * range.cta_groups;
        // floor(c T / n)
        const int begin = group * quotient + group * remainder / range.cta_groups - work.space_offset;
        return DecodeTiling::split_from(p, work.request, min(max(begin, 0), work.request.kv_tiles));
    }

    DEVICE int slot(int partial) const {
        if (partial == 0) return (cta_group * p.cta_group_size + range.cta_rank) * p.splits;
        const int segment = joined + partial - 1;
        const int begin = work.space_offset + DecodeTiling::split_start(p, work.request, segment);
        const int group = stream_k::cta_group_of(range, begin);
        return (group * p.cta_group_size + range.cta_rank) * p.splits + 1 + segment - segments_before(group);
    }
};
#endif

}  // namespace paged_decode
