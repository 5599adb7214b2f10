// How the work is cut: requests into pairs, pairs into tiles of one line, the line into shares, shares into pieces.
#pragma once
#include "config.cuh"

namespace paged_decode {

DEVICE int stated_length(const Params& p, int request) { return static_cast<const int*>(p.seq_lens)[request]; }

DEVICE int clamped_start(const Params& p, int request) {
    return min(max(static_cast<const int*>(p.q_cu_seq_lens)[request], 0), p.tokens);
}

DEVICE Request request_at(const Params& p, int index) {
    Request r;
    r.index = index;
    r.length = min(max(stated_length(p, index), 0), p.max_seq_len);
    r.q_start = index * p.q_len;
    r.q_len = p.q_len;
    if (p.q_cu_seq_lens != nullptr) {
        r.q_start = clamped_start(p, index);
        r.q_len = min(max(clamped_start(p, index + 1) - r.q_start, 0), p.q_len);
    }
    // A row of a tree may sit one before the draft block, if its mask is empty.
    const int begin = p.window_left < 0 ? 0 : max(0, r.length - r.q_len - 1 - p.window_left);
    r.first_tile = begin / TILE_TOKENS;
    r.tiles = max(1, (r.length + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile);
    const int rows = r.q_len * p.group;
    r.row_tiles = rows < p.min_rows || rows > p.max_rows ? 0 : (rows + ROWS - 1) / ROWS;
    return r;
}

// The query token of a flat row, and the query head of its KV head's group: exact for all rows that there can be.
struct RowPlace {
    int token, head;
};

DEVICE RowPlace place_of(const Params& p, int flat_row) {
    const int token = static_cast<int>(static_cast<uint32_t>(flat_row) * static_cast<uint32_t>(p.group_reciprocal) >> DECODE_GROUP_RECIPROCAL_BITS);
    return {token, flat_row - token * p.group};
}

DEVICE uint32_t mask_word(const Params& p, const Request& r, int token) {
    if (p.mask == nullptr) return (2u << token) - 1;
    return static_cast<const uint32_t*>(p.mask)[r.q_start + token] & ((1u << r.q_len) - 1);
}

// The first key in the window of a query token.
DEVICE int window_begin(const Params& p, const Request& r, int token) {
    if (p.window_left < 0) return 0;
    return max(0, r.length - r.q_len + __popc(mask_word(p, r, token)) - 1 - p.window_left);
}

DEVICE float device_factor(const void* factor) { return factor == nullptr ? 1.f : *static_cast<const float*>(factor); }

// Part of a pair: tiles [first, last) of the request's, for one KV head and one tile of rows.
struct Piece {
    Request request;
    Rows rows;
    int row_tile;
    int first, last;
    int line_start;  // index of the pair's tile 0 on the line of all tiles
    int split;       // where pairs are cut in a fixed number of splits: which this is
    int begin;       // no row sees a key in front of this one
};

// The end of a piece's tiles with keys: the one of a request without any is not in the ring.
DEVICE int end_of_keys(const Piece& piece) {
    const Request& r = piece.request;
    return min(piece.last, (r.length + TILE_TOKENS - 1) / TILE_TOKENS - r.first_tile);
}

// The team that has a tile of the line: team c begins at floor(c T / n), so tile x lies in floor(((x + 1) n - 1) / T).
DEVICE int team_of(const Share& share, int tile) {
    if (static_cast<int64_t>(share.total) * share.teams < INT32_MAX)
        return (static_cast<uint32_t>(tile + 1) * share.teams - 1) / static_cast<uint32_t>(share.total);
    return static_cast<int>((static_cast<int64_t>(tile + 1) * share.teams - 1) / share.total);
}

DEVICE Request request_of_lane(const Request& own, int lane) {
    const auto value_of = [&](int value) { return __shfl_sync(~0u, value, lane); };
    return {value_of(own.index), value_of(own.length),     value_of(own.q_start),  value_of(own.q_len),
            value_of(own.first_tile), value_of(own.tiles), value_of(own.row_tiles)};
}

// Of a pair that a cluster has for itself: an equal part of its tiles, which may be none.
DEVICE Share share_of_cluster(const Params& p) {
    const int row_tile = gridDim.z == p.batch ? 0 : blockIdx.z / p.batch, part = blockIdx.x;
    Share share;
    share.team = share.member = share.block_start = 0;
    share.total = share.teams = 1;
    share.request = request_at(p, blockIdx.z - row_tile * p.batch);
    share.block = blockIdx.y * share.request.row_tiles + row_tile;
    share.first = part * share.request.tiles >> p.cluster_size_log2;
    const int last = (part + 1) * share.request.tiles >> p.cluster_size_log2;
    share.tiles = row_tile < share.request.row_tiles ? last - share.first : -1;
    return share;
}

// Found by each warp on its own from the lengths: each lane adds up as many requests, then they look into those of one lane.
DEVICE Share find_share(const Params& p) {
    if (p.cluster_size_log2 >= 0) return share_of_cluster(p);
    const int lane = threadIdx.x % 32;
    Share share;
    share.team = blockIdx.y;
    share.member = blockIdx.x;
    share.teams = 0;
    int first = 0, count = p.batch;  // requests looked at
    int begin = 0, before = 0;       // tiles in front of the share, and of those requests
#pragma unroll 1
    for (;;) {
        const int each = (count + 31) / 32;
        Request last;  // of the lane's
        int own = 0;
        last.tiles = 1;
#pragma unroll 1  // what follows the first request's lengths is there with them
        for (int i = lane * each; i < min((lane + 1) * each, count); ++i) {
            last = request_at(p, first + i);
            own += last.tiles * last.blocks(p);
        }
        int through = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        if (share.teams == 0) {
            const int total = __shfl_sync(~0u, through, 31);
            share.total = total;
            share.teams = max(1, min(static_cast<int>(gridDim.y), total));
            share.tiles = 0;
            if (share.team >= min(share.teams, total)) return share;
            const int quotient = total / share.teams, remainder = total - quotient * share.teams;
            const auto begin_of = [&](int team) { return team * quotient + team * remainder / share.teams; };  // floor(team T / n)
            begin = begin_of(share.team);
            share.tiles = begin_of(share.team + 1) - begin;
        }
        const int winner = __ffs(__ballot_sync(~0u, before + through > begin)) - 1;
        before += __shfl_sync(~0u, through - own, winner);
        first += winner * each;
        count = min(each, count - winner * each);
        if (each == 1) {
            share.request = request_of_lane(last, winner);
            share.block = (begin - before) / share.request.tiles;
            share.block_start = before + share.block * share.request.tiles;
            share.first = begin - share.block_start;
            return share;
        }
    }
}

// Short requests in a few, so that one alone spreads over the GPU; long ones in parts for which merging costs little. It never
// falls with the tiles, so a bound on the tiles bounds it.
DEVICE int split_count(const Params& p, const Request& r) {
    constexpr int PART = DECODE_SPLIT_TOKENS / TILE_TOKENS, LEAST = DECODE_SHORT_SPLIT_TOKENS / TILE_TOKENS;
    return min(p.splits, max((r.tiles + PART - 1) / PART, min(DECODE_SHORT_SPLITS, (r.tiles + LEAST - 1) / LEAST)));
}

DEVICE int split_start(const Request& r, int split, int count) {
    return static_cast<uint32_t>(split) * static_cast<uint32_t>(r.tiles) / static_cast<uint32_t>(count);
}

// Calls visit(piece) for each piece of the share, in order; producer and consumers walk the same way.
template <class Visit>
DEVICE void for_each_piece(const Params& p, const Share& share, Visit visit) {
    int left = share.tiles, block = share.block, first = share.first, block_start = share.block_start;
    if (left < 0 || (left == 0 && p.cluster_size_log2 < 0)) return;
    Piece piece;
    piece.split = 0;
    piece.request = share.request;
    const Request& r = piece.request;
    if (p.splits > 0) {
        // A split belongs to the team in whose share it begins.
        const int count = split_count(p, r);
        piece.split = (static_cast<uint32_t>(first) * static_cast<uint32_t>(count) + r.tiles - 1) / r.tiles;
        const int begin = split_start(r, piece.split, count);
        left -= begin - first;
        first = begin;
        if (left <= 0) return;
    }
#pragma unroll 1
    do {
        if (first == r.tiles) {
            first = piece.split = 0;
            block_start += r.tiles;
            if (++block == r.blocks(p)) {
                block = 0;
                do piece.request = request_at(p, r.index + 1);
                while (r.row_tiles == 0);
            }
        }
        const int pair = block * p.cta_group_size + share.member;
        piece.rows.q_start = r.q_start;
        piece.rows.head = r.row_tiles == 1 ? pair : pair / r.row_tiles;
        piece.row_tile = pair - piece.rows.head * r.row_tiles;
        piece.rows.first = piece.row_tile * ROWS;
        piece.rows.count = min(ROWS, r.q_len * p.group - piece.rows.first);
        piece.line_start = block_start;
        piece.first = first;
        piece.last = p.splits > 0 ? split_start(r, piece.split + 1, split_count(p, r)) : min(r.tiles, first + left);
        piece.begin = 0;
        if (p.window_left >= 0) {
            piece.begin = window_begin(p, r, 0);
            if (p.mask != nullptr)
#pragma unroll 1
                for (int token = 1; token < r.q_len; ++token) piece.begin = min(piece.begin, window_begin(p, r, token));
        }
        visit(piece);
        left -= piece.last - first;
        first = piece.last;
        ++piece.split;
    } while (left > 0);
}

}  // namespace paged_decode
