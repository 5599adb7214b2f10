// Stream-K scheduling of split-KV attention.
//
// An output tile is a tile of query rows of one request (and KV head), which attends to all KV tiles of the request.
// CTAs work in groups of `cta_group_size`; each CTA of a group computes its own output tile of a tile group, so that
// neighbours read the same tokens at about the same time. The KV tiles of all tile groups form the tile space; each CTA
// group has a contiguous work range of it, which is walked as work tiles: the part of the range that lies in one output
// tile. An output tile that lies in several ranges is split: each CTA writes a partial, and the partials are merged. If
// no output tile has more than `slack_tiles` KV tiles, none is split: each range begins and ends at the boundary of
// output tiles that is nearest, and is longer than an equal share by no more than that. A family may do so for longer
// ones, too; or it cuts output tiles into pieces of equally many KV tiles, one for each CTA group. Then an output tile
// has tiles without keys in front, which make its tiles a multiple of a piece.
//
// With `splits` > 0 (batch invariance) output tiles are cut by the request's own length alone, and a CTA group computes
// the splits that begin in its range: each is a work tile, or all those of an output tile together.
//
// A kernel family says how it cuts its requests in a struct `Tiling` of static functions of the parameters `p`:
//     Request load_request(p, index)
//     int cta_group(p), cta_rank(p)              this CTA's group, and its number in the group
//     int cta_groups(p)                          in the grid
//     int tile_groups(p, request)                groups of `cta_group_size` output tiles of the request
//     int useful_groups(p, longest, total, groups)   of so many CTA groups, those that save more than merging costs,
//                                                where the longest output tile has that many KV tiles, and all `total`
//     bool keeps_whole(p, longest, share)        whether none is split although the longest output tile has that many
//                                                KV tiles, and an equal share of the tile space this many
//     bool CUTS_PIECES                           whether it ever cuts pieces
//     int longest_piece(p, longest, total, groups)   KV tiles of a piece that take no longer than an equal share of as
//                                                many CTA groups, likewise; 0: none are cut
//     bool in_clusters(p, longest, share)        whether each output tile has a cluster instead
//     int split_count(p, request)                splits of its output tiles, where `splits` > 0
//     int split_start(p, request, split)         the KV tile where a split begins; for the count, the end of all
//     int split_from(p, request, tile)           the first split that begins at or behind a KV tile; the count: none
//     bool JOINS_SPLITS                          whether a work tile is all splits of an output tile in a range
//                                                (EqualSplits has these three)
//     int max_row_tiles(p)                       bound on the row tiles of a request
//     int output_tile_index(p, work, row_tiles)  number of the output tile if all requests had `row_tiles` row tiles
// Every parameter struct has the fields seq_lens, q_cu_seq_lens, batch, tokens, q_len, max_seq_len, cta_group_size,
// splits, slack_tiles and status.
#pragma once
#include "KernelConstants.h"
#include "ptx.cuh"

namespace stream_k {

// A request, clamped to the bounds of the launch.
struct Request {
    int index;
    int kv_len;
    int q_begin;  // its first query token among all tokens
    int q_len;
    int first_tile;  // the first KV tile that is read: with a sliding window, earlier ones are skipped
    int kv_tiles;  // a request without keys still owns one empty tile, whose CTA writes its output
    int row_tiles;  // of each KV head; 0: nothing to compute
};

template <class Params>
DEVICE int given_kv_len(const Params& p, int request) {
    return static_cast<const int*>(p.seq_lens)[request];
}

template <class Params>
DEVICE int clamped_q_offset(const Params& p, int request) {
    return min(max(static_cast<const int*>(p.q_cu_seq_lens)[request], 0), p.tokens);
}

// Only the lengths of a request and where its queries lie.
template <class Params>
DEVICE Request load_lengths(const Params& p, int index) {
    Request r;
    r.index = index;
    r.kv_len = min(max(given_kv_len(p, index), 0), p.max_seq_len);
    r.q_begin = index * p.q_len;
    r.q_len = p.q_len;
    if (p.q_cu_seq_lens != nullptr) {
        r.q_begin = clamped_q_offset(p, index);
        r.q_len = min(max(clamped_q_offset(p, index + 1) - r.q_begin, 0), p.q_len);
    }
    return r;
}

// Called by `threads` threads with their numbers.
template <class Params>
DEVICE void report_invalid_lengths(const Params& p, int thread, int threads) {
    uint32_t status = 0;
    for (int b = thread; b < p.batch; b += threads) {
        const int kv_len = given_kv_len(p, b);
        if (kv_len > p.max_seq_len) status |= STATUS_LENGTH_OVER_BOUND;
        if (kv_len < 0) status |= STATUS_LENGTH_NEGATIVE;
        if (p.q_cu_seq_lens != nullptr) {
            const int* starts = static_cast<const int*>(p.q_cu_seq_lens) + b;
            const int64_t q_len = static_cast<int64_t>(starts[1]) - starts[0];
            if (q_len < 0 || q_len > p.q_len || starts[0] < 0 || starts[1] > p.tokens) status |= STATUS_QUERIES;
        }
    }
    if (status) atomicOr(static_cast<uint32_t*>(p.status), status);
}

// ---------------------------------------------------------------- work ranges

// A CTA group's contiguous range of the tile space.
struct WorkRange {
    int cta_group, cta_rank;  // the CTA is number `cta_rank` of the `cta_group_size` CTAs of its group
    int kv_tiles;  // in the range; if none, what follows is not set
    Request request;  // where the range begins: request, tile group, KV tile
    int tile_group, first;
    int group_offset;  // tile space index of that tile group's KV tile 0
    int total, cta_groups;  // KV tiles in the whole tile space, CTA groups that have any; 0: clusters, no tile space
    bool whole;  // the range begins and ends with output tiles
};

// The CTA group that computes a KV tile. Group c of n begins at floor(c T / n), so it is the largest c with
// c T < (tile + 1) n. The estimate is off by one at most, for up to 2^10 groups. There is no 64-bit division, because
// that is a call, after which the compiler no longer knows that values are warp-uniform.
DEVICE int cta_group_of(const WorkRange& range, int tile) {
    const int64_t scaled = static_cast<int64_t>(tile + 1) * range.cta_groups;
    const int estimate = static_cast<int>(__fdividef(static_cast<float>(tile) * range.cta_groups, range.total));
    const int64_t begin = static_cast<int64_t>(estimate) * range.total;
    return estimate + (begin + range.total < scaled) - (begin >= scaled);
}

DEVICE Request request_of_lane(const Request& own, int lane) {
    const auto value_of = [&](int value) { return __shfl_sync(~0u, value, lane); };
    return {value_of(own.index),      value_of(own.kv_len),   value_of(own.q_begin),  value_of(own.q_len),
            value_of(own.first_tile), value_of(own.kv_tiles), value_of(own.row_tiles)};
}

// Pieces of an output tile, at most 2^10 of at most MAX_PIECE KV tiles. The quotient is off by two units in the last
// place at most, so its distance to an integer tells. An integer division would be much code that is run once.
constexpr int MAX_PIECE = 512;
DEVICE int piece_count(int tiles, int piece) {
    return static_cast<int>(__fdividef(tiles + piece - .5f, static_cast<float>(piece)));
}

// A warp finds its CTA's work range from the lengths: each lane sums up an equal number of requests, then the search
// continues among the requests of one lane.
template <class Tiling, class Params>
DEVICE WorkRange find_work_range(const Params& p) {
    const int lane = threadIdx.x % 32;
    WorkRange range;
    range.cta_group = Tiling::cta_group(p);
    range.cta_rank = Tiling::cta_rank(p);
    range.cta_groups = 0;
    int first = 0, count = p.batch;  // requests that are searched
    int longest = 0;  // KV tiles of the longest of a lane's requests
    int begin = 0, before = 0;  // KV tiles before the range, and before those requests
    int groups = 0, space = 0;  // of the tile space without pieces: CTA groups, KV tiles
    int piece = 0, longest_piece = 0;  // KV tiles; 0: none are cut
#pragma unroll 1
    for (;;) {
        const int each = (count + 31) / 32;
        Request last;  // of the lane's requests
        int own = 0;
        last.kv_tiles = 1;
#pragma unroll 1  // not unrolled: the first request's lengths bring the others' with them
        for (int i = lane * each; i < min((lane + 1) * each, count); ++i) {
            last = Tiling::load_request(p, first + i);
            if (Tiling::CUTS_PIECES && piece > 0) last.kv_tiles = piece_count(last.kv_tiles, piece) * piece;
            own += last.kv_tiles * Tiling::tile_groups(p, last);
            longest = max(longest, last.kv_tiles);
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
            range.kv_tiles = 0;
            if (piece == 0) {
                range.cta_groups = max(1, min(Tiling::cta_groups(p), total));
                longest = static_cast<int>(__reduce_max_sync(~0u, static_cast<uint32_t>(longest)));
                range.cta_groups = Tiling::useful_groups(p, longest, total, range.cta_groups);
                const int share = total / range.cta_groups;
                range.whole = longest <= p.slack_tiles || Tiling::keeps_whole(p, longest, share);
                if (Tiling::in_clusters(p, longest, share)) {
                    range.cta_groups = 0;
                    return range;
                }
                if (Tiling::CUTS_PIECES && !range.whole && space < total) {
                    space = total;
                    groups = range.cta_groups;
                    longest_piece = Tiling::longest_piece(p, longest, total, groups);
                    piece = share + (share * groups < total);
                    if (piece <= longest_piece) {
                        range.cta_groups = 0;
                        continue;
                    }
                    piece = 0;
                }
            } else if (total > groups * piece) {
                // As long as the tiles without keys would be in pieces of this length.
                const int excess = total - groups * piece;
                piece += static_cast<int>(__fdividef(static_cast<float>(excess) * piece, max(space - excess, 1))) + 1;
                if (piece > longest_piece) piece = longest = 0;
                continue;
            } else {
                range.cta_groups = piece_count(total, piece);
            }
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
            if (range.whole) {
                const int tiles = range.request.kv_tiles;
                const int moved = (range.first > tiles / 2 ? tiles : 0) - range.first;
                range.first += moved;
                range.kv_tiles -= moved;
            }
            return range;
        }
    }
}

// ---------------------------------------------------------------- work tiles

// KV tiles [first, last) of one output tile, which one CTA computes.
struct WorkTile {
    Request request;
    int output_tile;  // of the request; the last tile group may have fewer output tiles than CTAs
    int first, last;
    int space_offset;  // tile space index of the output tile's KV tile 0
    int split;  // number of this split, where output tiles are cut into a fixed number of splits
};

DEVICE int equal_split_start(const Request& r, int split, int count) {
    return static_cast<uint32_t>(split) * static_cast<uint32_t>(r.kv_tiles) / static_cast<uint32_t>(count);
}

// Splits of equal length, as many as `Tiling` says; each is a work tile.
template <class Tiling>
struct EqualSplits {
    static constexpr bool JOINS_SPLITS = false;

    template <class Params>
    DEVICE static int split_start(const Params& p, const Request& r, int split) {
        return equal_split_start(r, split, Tiling::split_count(p, r));
    }

    template <class Params>
    DEVICE static int split_from(const Params& p, const Request& r, int tile) {
        const int count = Tiling::split_count(p, r);
        return (static_cast<uint32_t>(tile) * static_cast<uint32_t>(count) + r.kv_tiles - 1) / r.kv_tiles;
    }
};

// Walks the work tiles of a range in order; all warps of a CTA walk alike:
//     if (range.kv_tiles > 0 && begin())
//         do if (find_output_tile()) find_kv_tiles(), advance() while (left > 0); otherwise it ends
// `Work` is a WorkTile, to which the family adds what it derives.
template <class Tiling, class Work>
struct RangeWalk {
    int left;  // KV tiles of the range from here on
    int tile_group, first, group_offset;
    Work work;

    RangeWalk() = default;
    DEVICE explicit RangeWalk(const WorkRange& range)
        : left(range.kv_tiles), tile_group(range.tile_group), first(range.first), group_offset(range.group_offset) {}

    // Goes to the beginning of a range that is not empty. Returns whether there is a work tile.
    template <class Params>
    DEVICE bool begin(const Params& p, const WorkRange& range) {
        work.split = 0;
        work.request = range.request;
        const Request& r = work.request;
        if (p.splits > 0) {
            // A split belongs to the CTA group in whose range it begins.
            work.split = Tiling::split_from(p, r, first);
            const int begin = Tiling::split_start(p, r, work.split);
            left -= begin - first;
            first = begin;
            if (left <= 0) return false;
        }
        return true;
    }

    // Finds the output tile of the next work tile: this one, or the next if it is done. Returns whether the range takes
    // it: of whole output tiles, the last belongs to the range in which it mostly lies.
    template <class Params>
    DEVICE bool find_output_tile(const Params& p, const WorkRange& range) {
        const Request& r = work.request;
        if (first >= r.kv_tiles) {
            first = work.split = 0;
            group_offset += r.kv_tiles;
            if (++tile_group == Tiling::tile_groups(p, r)) {
                tile_group = 0;
                do work.request = Tiling::load_request(p, r.index + 1);
                while (r.row_tiles == 0);
            }
        }
        work.output_tile = tile_group * p.cta_group_size + range.cta_rank;
        return !range.whole || left > r.kv_tiles / 2;
    }

    // Finds the KV tiles of the work tile.
    template <class Params>
    DEVICE void find_kv_tiles(const Params& p, const WorkRange& range) {
        const Request& r = work.request;
        work.space_offset = group_offset;
        work.first = first;
        if constexpr (Tiling::JOINS_SPLITS)
            work.last = Tiling::split_start(p, r, Tiling::split_from(p, r, min(r.kv_tiles, first + left)));
        else if (range.whole)
            work.last = r.kv_tiles;
        else
            work.last = p.splits > 0 ? Tiling::split_start(p, r, work.split + 1) : min(r.kv_tiles, first + left);
    }

    // Computes `left` again, so that it needs no register while a work tile is processed.
    DEVICE void recount(const WorkRange& range) {
        left = range.group_offset + range.first + range.kv_tiles - group_offset - first;
    }

    // Goes past the work tile.
    DEVICE void advance() {
        left -= work.last - first;
        first = work.last;
        ++work.split;
    }
};

// The split-KV partials of an output tile, in the order in which they are merged: where they lie in the workspace.
struct SplitSet {
    int count;  // 1: the output tile is not split, nothing goes through the workspace
    int index;  // of the split that this CTA computes
    int counter;  // of the output tile
    int base, step, odd_first;
    DEVICE int slot(int split) const { return base + split * step + (split == 0 ? odd_first : 0); }
};

template <class Tiling, class Params, class Work>
DEVICE SplitSet splits_of(const Params& p, const WorkRange& range, const Work& work) {
    SplitSet splits;
    const Request& r = work.request;
    if (p.splits > 0) {
        const int row_tiles = Tiling::max_row_tiles(p);
        splits.count = Tiling::split_count(p, r);
        splits.index = work.split;
        splits.counter = Tiling::output_tile_index(p, work, row_tiles);
        splits.base = splits.counter * p.splits;
        splits.step = 1;
        splits.odd_first = 0;
        return splits;
    }
    const int first = work.first == 0 ? range.cta_group : cta_group_of(range, work.space_offset);
    const int last =
        work.last == r.kv_tiles ? range.cta_group : cta_group_of(range, work.space_offset + r.kv_tiles - 1);
    splits.count = last - first + 1;
    splits.index = range.cta_group - first;
    splits.counter = first * p.cta_group_size + range.cta_rank;
    // A CTA has at most one partial that begins an output tile (odd slot) and one that continues it (even slot).
    splits.base = PARTIALS_PER_CTA * splits.counter;
    splits.step = PARTIALS_PER_CTA * p.cta_group_size;
    splits.odd_first = 1;
    return splits;
}

}  // namespace stream_k
