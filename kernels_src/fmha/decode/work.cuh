// How the work is cut: requests into pairs, pairs into tiles of one line, the line into shares, shares into pieces.
#pragma once
#include "config.cuh"

namespace paged_decode {

// One request as the launch sees it, clamped to its bounds.
struct Request {
    int index;
    int length;      // keys
    int q_start;     // its first query token among all
    int q_len;       // query tokens
    int first_tile;  // of its keys; with a window, tiles in front of it are left out
    int tiles;       // a request without keys still owns one (empty) tile, whose CTA writes its output
    int row_tiles;
    int blocks;      // of `heads_together` (KV head, row tile) pairs
};

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
    r.row_tiles = (r.q_len * p.group + ROWS - 1) / ROWS;
    r.blocks = p.kv_heads / p.heads_together * r.row_tiles;
    return r;
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
    int head, row_tile;
    int first, last;
    int line_start;  // index of the pair's tile 0 on the line of all tiles
    int split;       // where pairs are cut in a fixed number of splits: which this is
    int begin;       // no row sees a key in front of this one
    int rows;        // of ROWS, those that exist
};

// The team's share of the line, found by each warp on its own from the lengths.
struct Share {
    int team, member;         // the CTA is one of `heads_together` in its team
    int begin, end;           // tiles on the line
    int request, line_start;  // where `begin` lies: request, and the index of its first tile
    int total, teams;         // tiles in all, teams that have any
};

DEVICE Share find_share(const Params& p) {
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int b = lane; b < p.batch; b += 32) {
        const Request r = request_at(p, b);
        total += r.tiles * r.blocks;
    }
    Share share;
    share.team = blockIdx.x / p.heads_together;
    share.member = blockIdx.x % p.heads_together;
    share.total = total = __reduce_add_sync(~0u, total);
    share.teams = min(static_cast<int>(gridDim.x / p.heads_together), total);
    if (share.team >= share.teams) {
        share.begin = share.end = share.request = share.line_start = 0;
        return share;
    }
    share.begin = static_cast<int>(static_cast<int64_t>(share.team) * total / share.teams);
    share.end = static_cast<int>(static_cast<int64_t>(share.team + 1) * total / share.teams);
    int before = 0;
    for (int base = 0;; base += 32) {
        const int b = base + lane;
        int own = 0;
        if (b < p.batch) {
            const Request r = request_at(p, b);
            own = r.tiles * r.blocks;
        }
        int through = own;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, through, step);
            if (lane >= step) through += other;
        }
        const uint32_t past = __ballot_sync(~0u, before + through > share.begin);
        if (past) {
            const int winner = __ffs(past) - 1;
            share.request = base + winner;
            share.line_start = before + __shfl_sync(~0u, through - own, winner);
            return share;
        }
        before += __shfl_sync(~0u, through, 31);
    }
}

DEVICE int split_count(const Params& p, const Request& r) { return min(p.splits, r.tiles); }

DEVICE int split_start(const Params& p, const Request& r, int split) {
    return static_cast<int>(static_cast<int64_t>(split) * r.tiles / split_count(p, r));
}

// Calls visit(piece) for each piece of the share, in order; producer and consumers walk the same way.
template <class Visit>
DEVICE void for_each_piece(const Params& p, const Share& share, Visit visit) {
    int position = share.begin, request_start = share.line_start, index = share.request;
    while (position < share.end) {
        Piece piece;
        piece.request = request_at(p, index);
        const Request& r = piece.request;
        const int size = r.tiles * r.blocks;
        if (position - request_start >= size) {
            request_start += size;
            ++index;
            continue;
        }
        const int block = (position - request_start) / r.tiles;
        const int pair = block * p.heads_together + share.member;
        piece.head = pair / r.row_tiles;
        piece.row_tile = pair % r.row_tiles;
        piece.line_start = request_start + block * r.tiles;
        piece.first = position - piece.line_start;
        if (p.splits == 0) {
            piece.split = 0;
            piece.last = min(r.tiles, piece.first + share.end - position);
        } else {
            // A split belongs to the team in whose share it begins.
            const int count = split_count(p, r);
            piece.split = static_cast<int>((static_cast<int64_t>(piece.first) * count + r.tiles - 1) / r.tiles);
            piece.first = split_start(p, r, piece.split);
            piece.last = split_start(p, r, piece.split + 1);
            position = piece.line_start + piece.first;
            if (piece.split == count) continue;
            if (position >= share.end) break;
        }
        piece.rows = min(ROWS, r.q_len * p.group - piece.row_tile * ROWS);
        piece.begin = window_begin(p, r, 0);
        if (p.mask != nullptr)
            for (int token = 1; token < r.q_len; ++token) piece.begin = min(piece.begin, window_begin(p, r, token));
        visit(piece);
        position = piece.line_start + piece.last;
    }
}

}  // namespace paged_decode
