// Work tiles of MLA decode, cut by row tile, and their partials; scheduled by common/stream_k.cuh.
#pragma once
#include "../common/context_parallel.cuh"
#include "../common/pipeline.cuh"
#include "../common/stream_k.cuh"
#include "../common/wgmma.cuh"
#include "KernelConstants.h"
#if SPARSE
#include "SparseMlaDecodeParams.h"
#elif SEPARATE_VALUES
#include "PagedMlaDecodeValuesParams.h"
#else
#include "PagedMlaDecodeParams.h"
#endif

namespace paged_mla_decode {

using stream_k::Request;
using stream_k::SplitSet;

// Build: -DROWS=n query rows (tokens x heads) of a CTA, -DTILE_TOKENS=n keys of a KV tile, -DLATENT=n columns of a
// value, -DROPE=n columns of a key behind them.
constexpr int COLUMNS = LATENT + ROPE;  // of a key
// Of the output, as consumers share them out. Those behind the latent ones have no values and are not stored.
constexpr int OUTPUT_COLUMNS = LATENT < 256 ? 256 : LATENT;
constexpr bool PADDED = OUTPUT_COLUMNS > LATENT;
#if SPARSE
// -DSPLIT_TILES=n tiles of a split under batch invariance
using Params = SparseMlaDecodeParams;
constexpr bool SCALED = KV_E4M3;  // rows of the cache have a scale for each 128 columns
constexpr int SCALE_BLOCKS = SCALED ? LATENT / 128 : 0;
#else
// -DBOX_COLUMNS=n columns of a TMA box, -DL2_POLICY=word and -DGROUP_L2_POLICY=word (an L2Policy)
#if SEPARATE_VALUES  // they lie in memory of their own, not in their keys
using Params = PagedMlaDecodeValuesParams;
#else
using Params = PagedMlaDecodeParams;
#endif
using stream_k::report_invalid_lengths;
constexpr bool SCALED = false;
constexpr int SPLIT_TILES = MLA_SPLIT_TILES;
static_assert(TILE_TOKENS % MLA_MIN_PAGE_TOKENS == 0, "chunks of a tile are whole pages or parts of one");
constexpr int ROW_BYTES_LOG2 = (BOX_COLUMNS == 128 ? 7 : 6) + !KV_E4M3;  // of a token in a box
#endif
constexpr int CONSUMERS = ROWS == 64 ? 256 : OUTPUT_COLUMNS / 2;  // threads that hold the output

// Shared memory of each consumer warp for the merge, reused once all KV tiles are processed: MERGED_BLOCKS blocks of
// four rows, and of as many splits the rows' maxima and sums, then their scales, which become weights.
constexpr int MERGED_BLOCKS = TILE_TOKENS < 64 ? 16 : 32;
constexpr int MERGE_COLUMNS = 32;  // of a block
constexpr int BLOCK_BYTES = 4 * MERGE_COLUMNS * sizeof(uint16_t);
constexpr int SPLIT_WEIGHTS = 4 * sizeof(float2), SPLIT_BYTES = SPLIT_WEIGHTS + 4 * sizeof(float);
constexpr int MERGE_BYTES = MERGED_BLOCKS * (BLOCK_BYTES + SPLIT_BYTES);

// Below every maximum that counts; finite, so that the difference of two of them is 0 and not NaN.
constexpr float LOWEST = -1e30f;
constexpr float MAXIMUM_SLACK = 8.f;  // base-2 exponent by which a score may exceed the row maximum in use

// Warp-uniform in a way that the compiler recognises, so that operands of products are in uniform registers.
DEVICE uint32_t warp_uniform(uint32_t value) { return __shfl_sync(~0u, value, 0); }

DEVICE void wait_barrier(uint64_t& barrier, uint32_t phase) { mbarrier_wait(shared_address(&barrier), phase); }

// ---------------------------------------------------------------- work tiles

// A request without keys still owns one empty tile, whose CTA writes its output.
DEVICE int kv_tile_count(int kv_len) { return max(1, (kv_len + TILE_TOKENS - 1) / TILE_TOKENS); }

DEVICE int row_tile_count(const Params& p, int q_len) { return (q_len * p.heads + ROWS - 1) / ROWS; }

// x / cta_group_size, for x below 2^14.
DEVICE int divide_by_group_size(const Params& p, int x) {
    static_assert(MLA_MAX_CTA_GROUP == 4, "of 1 to 4");
    return x * (p.cta_group_size == 3 ? 21846 : 65536 >> p.cta_group_size / 2) >> 16;
}

// Groups of `cta_group_size` row tiles.
DEVICE int tile_groups_of(const Params& p, int row_tiles) {
    return divide_by_group_size(p, row_tiles + p.cta_group_size - 1);
}

#if SPARSE
// Each query token is a request of its own, whose keys are the entries of its list.
DEVICE Request load_lengths(const Params& p, int token) {
    Request r;
    r.index = r.q_begin = token;
    r.kv_len = p.width;
    if (p.topk_lens != nullptr) r.kv_len = min(max(static_cast<const int*>(p.topk_lens)[token], 0), p.width);
    r.q_len = 1;
    return r;
}

DEVICE int max_queries(const Params&) { return 1; }
DEVICE int query_type(const Params&) { return TYPE_BF16; }
#else
DEVICE Request load_lengths(const Params& p, int index) { return stream_k::load_lengths(p, index); }
DEVICE int max_queries(const Params& p) { return p.q_len; }
DEVICE int query_type(const Params& p) { return p.q_type; }
#endif

// How MLA decode cuts requests; see common/stream_k.cuh. All heads share one KV head, so output tiles are row tiles.
struct MlaTiling : stream_k::EqualSplits<MlaTiling> {
    DEVICE static Request load_request(const Params& p, int index) {
        Request r = load_lengths(p, index);
        r.first_tile = 0;
        r.kv_tiles = kv_tile_count(r.kv_len);
#if !SPARSE
        r.kv_tiles += p.start_tiles;  // without keys, in front: a range of many short output tiles takes no longer
#endif
        r.row_tiles = row_tile_count(p, r.q_len);
        return r;
    }

    DEVICE static int cta_group(const Params& p) { return divide_by_group_size(p, blockIdx.x); }
    DEVICE static int cta_rank(const Params& p) { return blockIdx.x - cta_group(p) * p.cta_group_size; }
    DEVICE static int cta_groups(const Params& p) { return divide_by_group_size(p, gridDim.x); }

    DEVICE static int tile_groups(const Params& p, const Request& r) { return tile_groups_of(p, r.row_tiles); }

    // The rule by which the host chooses a grid for the bounds (cta_groups in select.py), for lengths far below them.
    DEVICE static int useful_groups(const Params& p, int longest, int total, int groups) {
#if !SPARSE
        // The longest may be of a request without queries, which has no tile in `total`.
        if (p.splits == 0 && total < groups * MLA_MERGED_TILES)
            groups = min(
                groups, max(max(1, total / MLA_MERGED_TILES), total * MLA_MANY_SPLITS / max(longest, MLA_MANY_SPLITS)));
#endif
        return groups;
    }

    DEVICE static bool keeps_whole(const Params& p, int longest, int share) {
#if SPARSE
        return false;
#else
        return p.spread_tiles > 0 && longest - share <= p.spread_tiles;
#endif
    }

#if SPARSE
    static constexpr bool CUTS_PIECES = false;
    DEVICE static int longest_piece(const Params&, int, int, int) { return 0; }
#else
    static constexpr bool CUTS_PIECES = true;
    // Where several requests have CTA groups each, and the ranges of others parts of several output tiles.
    DEVICE static int longest_piece(const Params& p, int longest, int total, int groups) {
        constexpr int MIN_SHARE = 3, MANY_REQUESTS = 8, SPREAD = 8;
        const int share = total / groups;
        if (p.spread_tiles == 0 || p.batch == 1 || share >= stream_k::MAX_PIECE) return 0;
        if (share < MIN_SHARE && p.batch < MANY_REQUESTS) return 0;  // to find pieces takes longer than they gain
        const int output_tiles = p.batch * tile_groups_of(p, row_tile_count(p, p.q_len));
        // If all are about as long, a range has parts of two output tiles at most.
        if (longest * output_tiles <= total + total / 8)
            return output_tiles * stream_k::piece_count(longest, share + 1) <= groups ? share + 1 : 0;
        // Half a piece of each request is without keys.
        const int piece = min(share + SPREAD, stream_k::MAX_PIECE);
        return total <= piece * (groups - p.batch / 2) ? piece : 0;
    }
#endif

    DEVICE static bool in_clusters(const Params&, int, int) { return false; }

    // Splits so large that merging costs little. The count never falls when tiles are added, so a bound on the tiles
    // bounds it.
    DEVICE static int split_count(const Params& p, const Request& r) {
        return min(p.splits, (r.kv_tiles + SPLIT_TILES - 1) / SPLIT_TILES);
    }

    DEVICE static int max_row_tiles(const Params& p) { return row_tile_count(p, max_queries(p)); }

    DEVICE static int output_tile_index(const Params&, const stream_k::WorkTile& work, int row_tiles) {
        return work.request.index * row_tiles + work.output_tile;
    }
};

// Whether the accumulators of an output tile's last split take up the earlier ones, if one CTA has all splits.
constexpr bool FOLDS = ROWS == 64 && !KV_E4M3;
constexpr int FOLDED_SPLITS = MLA_INVARIANT_SPLITS;

// A work tile: KV tiles [first, last) of a (request, row tile), and where its partial goes if those are not all.
struct WorkTile {
    int request, row_tile, kv_len;
    int q_begin, q_len, rows;  // rows of the row tile that exist
    int first, last;
    SplitSet splits;  // counter -1: this CTA has all splits of the output tile, FOLDED_SPLITS at most

    DEVICE bool whole() const { return splits.count == 1; }
    DEVICE int key_tiles() const { return kv_len > 0 ? last - first : 0; }  // KV tiles that hold keys
    DEVICE int valid(int tile) const { return min(kv_len - tile * TILE_TOKENS, TILE_TOKENS); }
};

using RangeWalk = stream_k::RangeWalk<MlaTiling, stream_k::WorkTile>;

DEVICE int rows_of(const Params& p, const stream_k::WorkTile& work) {
    return min(ROWS, work.request.q_len * p.heads - work.output_tile * ROWS);
}

#if !SPARSE
// The same work tile of an output tile that begins with its keys. Without any, these are others'.
DEVICE stream_k::WorkTile without_start(stream_k::WorkTile work, int start) {
    work.request.kv_tiles -= start;
    work.space_offset += start;
    work.first = max(work.first - start, 0);
    work.last -= start;
    return work;
}
#endif

// With the first work tile.
struct WorkRange : stream_k::WorkRange {
    RangeWalk walk;  // at the first work tile
    SplitSet splits;
#if !SPARSE
    int start;  // tiles without keys in front of each of its output tiles
#endif
    bool any;  // whether there is a first work tile
};

// Finds the next work tile of a walk from here on, and its splits; false if there is none.
DEVICE bool find_work_tile(const Params& p, const WorkRange& range, RangeWalk& walk, SplitSet& splits) {
    for (; walk.left > 0; walk.advance()) {
        // Computed again: producers have few registers.
        walk.work.request.kv_tiles = kv_tile_count(walk.work.request.kv_len);
#if !SPARSE
        walk.work.request.kv_tiles += range.start;
#endif
        walk.work.request.row_tiles = row_tile_count(p, walk.work.request.q_len);
        if (!walk.find_output_tile(p, range)) break;
        walk.find_kv_tiles(p, range);
        if (rows_of(p, walk.work) <= 0) continue;
#if SPARSE
        splits = stream_k::splits_of<MlaTiling>(p, range, walk.work);
#else
        const stream_k::WorkTile work = without_start(walk.work, range.start);
        if (work.last <= 0) continue;
        splits = stream_k::splits_of<MlaTiling>(p, range, work);
#endif
        if (FOLDS && p.splits > 0 && splits.count <= FOLDED_SPLITS) {
            const int begin = range.group_offset + range.first, offset = walk.work.space_offset;
            const int last = offset + stream_k::equal_split_start(walk.work.request, splits.count - 1, splits.count);
            if (offset >= begin && last < begin + range.kv_tiles) splits.counter = -1;
        }
        return true;
    }
    return false;
}

// One warp finds the range and the first work tile for all: the code runs once, and is fetched from DRAM.
DEVICE void find_work_range(const Params& p, WorkRange& to) {
    WorkRange range;
    static_cast<stream_k::WorkRange&>(range) = stream_k::find_work_range<MlaTiling>(p);
    range.any = false;
    if (range.kv_tiles > 0) {
#if !SPARSE
        range.start = range.request.kv_tiles - kv_tile_count(range.request.kv_len);
#endif
        range.walk = RangeWalk(range);
        range.any = range.walk.begin(p, range) && find_work_tile(p, range, range.walk, range.splits);
    }
    if (threadIdx.x % 32 == 0) to = range;
}

// Iterates over the work tiles of a range in order; every warp iterates alike.
struct WorkTileIterator {
    const Params& p;
    const WorkRange& range;
    RangeWalk walk;

    DEVICE WorkTileIterator(const Params& params, const WorkRange& own) : p(params), range(own) {
        walk.work.request.index = -1;
    }

    DEVICE bool next(WorkTile& work) {
        bool any;
        if (walk.work.request.index < 0) {
            walk = range.walk;
            work.splits = range.splits;
            any = range.any;
        } else {
            walk.advance();
            walk.recount(range);
            any = find_work_tile(p, range, walk, work.splits);
        }
        const Request& r = walk.work.request;
        work.request = r.index;
        work.row_tile = walk.work.output_tile;
        work.kv_len = r.kv_len;
        work.q_begin = r.q_begin;
        work.q_len = r.q_len;
        work.rows = rows_of(p, walk.work);
#if SPARSE
        const stream_k::WorkTile& keys = walk.work;
#else
        const stream_k::WorkTile keys = without_start(walk.work, range.start);
#endif
        work.first = keys.first;
        work.last = keys.last;
        return any;
    }
};

constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float softmax_scale_log2(const Params& p) {
    const float* factor = static_cast<const float*>(p.softmax_scale_device);
#if SPARSE
    const float number = p.softmax_scale * LOG2_E;
    return factor == nullptr ? number : number * *factor;
#else
    return factor == nullptr ? p.softmax_scale_log2 : p.softmax_scale_log2 * *factor;
#endif
}

DEVICE int64_t row_offset(const WorkTile& work, int row, int heads, int64_t token_stride, int64_t head_stride) {
    const int request_row = work.row_tile * ROWS + row;
#if SPARSE
    return work.q_begin * token_stride + request_row * head_stride;
#else
    return (work.q_begin + request_row / heads) * token_stride + request_row % heads * head_stride;
#endif
}

// ---------------------------------------------------------------- queries

#if SPARSE
constexpr bool ROPE_APART = false;
DEVICE const void* rope_memory(const Params&) { return nullptr; }
DEVICE int64_t query_offset(const Params& p, const WorkTile& work, int row, bool) {
    return row_offset(work, row, p.heads, p.q_token_stride, p.q_head_stride);
}
#else
constexpr bool ROPE_APART = ROPE > 0;  // the rope columns of queries may lie in memory of their own

// Null: they follow the latent ones.
DEVICE const void* rope_memory(const Params& p) { return ROPE_APART ? p.q_rope : nullptr; }

// Elements from the first row of the queries to a head of a token; with `rope` from the first row of the rope columns,
// wherever they lie. Without branches: lanes may differ.
DEVICE int64_t query_offset(const Params& p, int token, int head, bool rope) {
    const bool of_rope = ROPE_APART && rope;
    return token * (of_rope ? p.q_rope_token_stride : p.q_token_stride) +
           head * (of_rope ? p.q_rope_head_stride : p.q_head_stride);
}

DEVICE int64_t query_offset(const Params& p, const WorkTile& work, int row, bool rope) {
    const int request_row = work.row_tile * ROWS + row;
    return query_offset(p, work.q_begin + request_row / p.heads, request_row % p.heads, rope);
}

// The first row of the queries; with `rope` so that the columns from LATENT on are the rope columns, wherever they lie,
// and others are not to be read.
DEVICE const char* first_query(const Params& p, int item, bool rope) {
    const bool apart = rope && rope_memory(p) != nullptr;
    return static_cast<const char*>(apart ? rope_memory(p) : p.q) - (apart ? LATENT * item : 0);
}
#endif

#if !SPARSE
// ---------------------------------------------------------------- masks

// Bit j: the row sees key j of its request's last q_len ones, which are its draft tokens' own.
DEVICE uint32_t visible_drafts(const Params& p, const WorkTile& work, int row) {
    const int request_row = work.row_tile * ROWS + row;
    const int token = min(request_row / p.heads, work.q_len - 1);
    if (context_parallel::is_on(p))
        return (1u << context_parallel::visible_count(p, work.request, work.kv_len, work.q_len, token)) - 1;
    if (token + work.kv_len < work.q_len) return 0;  // more queries than keys: this one comes before all keys
    const uint32_t draft = (1u << work.q_len) - 1;
    if (p.mask == nullptr) return ((2u << token) - 1) & draft;
    return static_cast<const uint32_t*>(p.mask)[work.q_begin + token] & draft;
}
#endif

}  // namespace paged_mla_decode
