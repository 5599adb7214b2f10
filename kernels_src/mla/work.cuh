// What a CTA of the MLA decode kernel works on: pieces of (request, row tile) pairs, found from the lengths on the device.
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

// Build: -DROWS=n query rows (tokens x heads) of a CTA, -DBOX_COLUMNS=n columns that a copy brings, -DTILE_TOKENS=n keys of a
// tile.
constexpr int COLUMNS = LATENT + MLA_ROPE_COLUMNS;  // of a key
constexpr int TILE_TOKENS_LOG2 = 6;
static_assert(TILE_TOKENS == 1 << TILE_TOKENS_LOG2);
constexpr int ROW_BYTES_LOG2 = (BOX_COLUMNS == 128 ? 7 : 6) + !KV_E4M3;  // of a token in a box
constexpr int CONSUMERS = ROWS == 64 ? 256 : LATENT / 2;                 // threads that have the output

// Of each consuming warp, at the beginning of shared memory once all tiles are through: what is multiplied with each of 16
// rows of each part of a pair, of which there are not more than CTAs.
constexpr int MERGE_BYTES = MLA_MAX_SPLITS * 16 * sizeof(float);

// Below every maximum that counts; finite, so that the difference of two of them is 0 and not NaN.
constexpr float LOWEST = -1e30f;
constexpr float MAXIMUM_SLACK = 8.f;  // base-2 exponents by which a score may exceed the maximum in use

DEVICE void wait_barrier(uint64_t& barrier, uint32_t parity) { mbarrier_wait(shared_address(&barrier), parity); }

// The next of COUNT places in turn; `parity` is that of its being full.
template <int COUNT>
struct Turn {
    int index = 0;
    uint32_t parity = 0;
    DEVICE void advance() {
        if (++index == COUNT) index = 0, parity ^= 1;
    }
};

// ---------------------------------------------------------------- requests

struct Request {
    int length, tiles;               // keys
    int first_query, queries, tiles_of_rows;
};

DEVICE int clamped_length(const Params& p, int request) {
    return min(max(static_cast<const int*>(p.seq_lens)[request], 0), p.max_seq_len);
}

// A request without keys still owns one (empty) tile, whose CTA writes its output.
DEVICE int tile_count(int length) { return max(1, (length + TILE_TOKENS - 1) / TILE_TOKENS); }

DEVICE int tiles_of_rows(const Params& p, int queries) { return (queries * p.heads + ROWS - 1) / ROWS; }

DEVICE Request read_request(const Params& p, int request) {
    Request r;
    r.length = clamped_length(p, request);
    r.tiles = tile_count(r.length);
    r.first_query = request * p.q_len;
    r.queries = p.q_len;
    if (p.q_cu_seq_lens != nullptr) {
        const int* edges = static_cast<const int*>(p.q_cu_seq_lens) + request;
        r.first_query = min(max(edges[0], 0), p.tokens);
        r.queries = min(max(min(edges[1], p.tokens) - r.first_query, 0), p.q_len);
    }
    r.tiles_of_rows = tiles_of_rows(p, r.queries);
    return r;
}

// x / cta_group_size, for x below 2^14.
DEVICE int over_team(const Params& p, int x) {
    static_assert(MLA_MAX_CTA_GROUP == 4, "of 1 to 4");
    return x * (p.cta_group_size == 3 ? 21846 : 65536 >> p.cta_group_size / 2) >> 16;
}

// Of as many row tiles as a team has members.
DEVICE int row_blocks(const Params& p, int row_tiles) { return over_team(p, row_tiles + p.cta_group_size - 1); }

// By `threads` threads, of which this is the `thread`-th.
DEVICE void report_lengths(const Params& p, int thread, int threads) {
    uint32_t seen = 0;
    for (int b = thread; b < p.batch; b += threads) {
        const int length = static_cast<const int*>(p.seq_lens)[b];
        if (length > p.max_seq_len) seen |= STATUS_LENGTH_OVER_BOUND;
        if (length < 0) seen |= STATUS_LENGTH_NEGATIVE;
        if (p.q_cu_seq_lens != nullptr) {
            const int* edges = static_cast<const int*>(p.q_cu_seq_lens) + b;
            if (edges[0] < 0 || edges[1] < edges[0] || edges[1] > p.tokens || edges[1] - edges[0] > p.q_len)
                seen |= STATUS_QUERIES;
        }
    }
    if (seen) atomicOr(static_cast<uint32_t*>(p.status), seen);
}

// ---------------------------------------------------------------- shares of the line of all tiles

// The accumulators of a pair's last part take up those before, if the share has them all.
constexpr bool FOLDS = ROWS == 64 && !KV_E4M3;
constexpr int FOLDED_PARTS = MLA_INVARIANT_SPLITS;

// Tiles [first, last) of a (request, row tile) pair, and where its partial goes when that is not all of them.
struct Piece {
    int request, row_tile, length;
    int first_query, queries, rows;  // rows of the tile that exist
    int first, last;
    int part, parts;     // of the pair
    int slot;             // of part 0's partial, see slot_of
    int counter;          // -1: the share has all parts of the pair, FOLDED_PARTS at most

    DEVICE bool whole() const { return parts == 1; }
    DEVICE int steps() const { return length > 0 ? last - first : 0; }  // tiles that hold keys
    DEVICE int valid(int tile) const { return min(length - tile * TILE_TOKENS, TILE_TOKENS); }
};

// A place on the line of all tiles.
struct Position {
    int tile, request, request_start;  // the request that the tile is of, and its first tile
};

// The CTA's share of the line, and what all warps begin with: found once, as its code comes from DRAM.
struct Share {
    int team, member;         // the CTA is one of `cta_group_size` in its team
    int end;                  // tiles on the line
    int teams;                // that have any tiles
    int quotient, remainder;  // of all tiles by teams
    float reciprocal;         // of teams
    Position next;            // behind the first piece
    bool any;                 // whether there is a first piece
    Piece piece;

    // Where a team's share begins: floor(team x tiles / teams) in 32 bits, for up to 2^10 teams.
    DEVICE int begin_of(int team) const {
        return team * quotient + static_cast<int>((team * remainder + 0.5f) * reciprocal);
    }
    // The team that has a tile. An estimate is off by one at most.
    DEVICE int team_of(int tile) const {
        const float tiles = quotient + remainder * reciprocal;
        const int team = min(static_cast<int>(__fdividef(tile + 0.5f, tiles)), teams - 1);
        return team + (team + 1 < teams && begin_of(team + 1) <= tile) - (begin_of(team) > tile);
    }
};

// Parts of a pair of so many tiles where `splits` bounds them: so long that merging costs little. It never falls with the
// tiles, so a bound on the tiles bounds it.
DEVICE int split_count(const Params& p, int tiles) {
    return min(p.splits, (tiles + MLA_SPLIT_TILES - 1) / MLA_SPLIT_TILES);
}

DEVICE int cta_of(const Params& p, const Share& share, int team) { return team * p.cta_group_size + share.member; }

// The piece at a place before the end of the share, and the place behind it; false: there is none.
DEVICE bool find_piece(const Params& p, const Share& share, Position& at, Piece& piece) {
    while (at.tile < share.end) {
        const Request r = read_request(p, at.request);
        const int blocks = row_blocks(p, r.tiles_of_rows);
        if (at.tile - at.request_start >= r.tiles * blocks) {
            at.request_start += r.tiles * blocks;
            ++at.request;
            continue;
        }
        const int block = static_cast<uint32_t>(at.tile - at.request_start) / static_cast<uint32_t>(r.tiles);
        const int line_start = at.request_start + block * r.tiles;
        const int local = at.tile - line_start;
        piece.request = at.request;
        piece.row_tile = block * p.cta_group_size + share.member;
        piece.length = r.length;
        piece.first_query = r.first_query;
        piece.queries = r.queries;
        piece.rows = min(ROWS, r.queries * p.heads - piece.row_tile * ROWS);
        if (p.splits == 0) {
            piece.first = local;
            piece.last = min(r.tiles, local + share.end - at.tile);
            at.tile += piece.last - piece.first;
            const int first_team = share.team_of(line_start), last_team = share.team_of(line_start + r.tiles - 1);
            piece.part = share.team - first_team;
            piece.parts = last_team - first_team + 1;
            // Of a CTA's slots the odd one is for the part that begins a pair, the even one for any other.
            piece.slot = PARTIALS_PER_CTA * cta_of(p, share, first_team) + 1;
            piece.counter = cta_of(p, share, first_team);
        } else {
            piece.parts = split_count(p, r.tiles);
            piece.part = (local * piece.parts + r.tiles - 1) / r.tiles;
            piece.first = piece.part * r.tiles / piece.parts;
            piece.last = (piece.part + 1) * r.tiles / piece.parts;
            if (piece.part == piece.parts) {  // the CTA before has the last part
                at.tile = line_start + r.tiles;
                continue;
            }
            if (line_start + piece.first >= share.end) break;
            at.tile = line_start + piece.last;
            piece.counter = piece.request * tiles_of_rows(p, p.q_len) + piece.row_tile;
            piece.slot = piece.counter * p.splits;
            if (FOLDS && piece.parts <= FOLDED_PARTS && line_start >= share.begin_of(share.team) &&
                line_start + (piece.parts - 1) * r.tiles / piece.parts < share.end)
                piece.counter = -1;
        }
        if (piece.rows > 0) return true;
    }
    return false;
}

DEVICE int tiles_of(const Params& p, int request) {
    if (request >= p.batch) return 0;
    const Request r = read_request(p, request);
    return r.tiles * row_blocks(p, r.tiles_of_rows);
}

// By one warp.
DEVICE void find_share(const Params& p, Share& to) {
    const int lane = threadIdx.x % 32;
    Share share;
    share.team = over_team(p, blockIdx.x);
    share.member = blockIdx.x - share.team * p.cta_group_size;
    share.any = false;
    int total = 0;
#pragma unroll 4
    for (int base = 0; base < p.batch; base += 32) total += tiles_of(p, base + lane);
    total = __reduce_add_sync(~0u, total);
    share.teams = min(over_team(p, gridDim.x), total);
    if (share.team < share.teams) {
        share.quotient = static_cast<uint32_t>(total) / static_cast<uint32_t>(share.teams);
        share.remainder = total - share.quotient * share.teams;
        share.reciprocal = __fdividef(1.f, share.teams);
        share.end = share.begin_of(share.team + 1);
        Position at{share.begin_of(share.team), 0, 0};
#pragma unroll 1
        for (;; at.request += 32) {
            const int own = tiles_of(p, at.request + lane), all = __reduce_add_sync(~0u, own);
            if (at.request_start + all <= at.tile) {
                at.request_start += all;
                continue;
            }
            int through = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, through, step);
                if (lane >= step) through += other;
            }
            const int winner = __ffs(__ballot_sync(~0u, at.request_start + through > at.tile)) - 1;
            at.request += winner;
            at.request_start += __shfl_sync(~0u, through - own, winner);
            break;
        }
        share.any = find_piece(p, share, at, share.piece);
        share.next = at;
    }
    if (lane == 0) to = share;
}

// Walks the pieces of a share in order; every warp walks the same way.
struct Walker {
    const Params& p;
    const Share& share;
    Position at;

    DEVICE Walker(const Params& params, const Share& own) : p(params), share(own), at{0, -1, 0} {}

    DEVICE bool next(Piece& piece) {
        if (at.request >= 0) return find_piece(p, share, at, piece);
        at = share.next;
        piece = share.piece;
        return share.any;
    }
};

DEVICE float softmax_scale_log2(const Params& p) {
    const float* factor = static_cast<const float*>(p.softmax_scale_device);
    return factor == nullptr ? p.softmax_scale_log2 : p.softmax_scale_log2 * *factor;
}

DEVICE int64_t row_offset(const Piece& piece, int row, int heads, int64_t token_stride, int64_t head_stride) {
    const int request_row = piece.row_tile * ROWS + row;
    return (piece.first_query + request_row / heads) * token_stride + request_row % heads * head_stride;
}

DEVICE int slot_step(const Params& p) { return p.splits > 0 ? 1 : PARTIALS_PER_CTA * p.cta_group_size; }

DEVICE int slot_of(const Params& p, const Piece& piece, int part) {
    return piece.slot + part * slot_step(p) - (p.splits == 0 && part > 0);
}

// ---------------------------------------------------------------- what a row sees

// Bit j: the row sees draft token j of its request.
DEVICE uint32_t visible_drafts(const Params& p, const Piece& piece, int row) {
    const int request_row = piece.row_tile * ROWS + row;
    const int token = min(request_row / p.heads, piece.queries - 1);
    if (token + piece.length < piece.queries) return 0;  // more queries than keys: this one comes before all keys
    const uint32_t draft = (1u << piece.queries) - 1;
    if (p.mask == nullptr) return ((2u << token) - 1) & draft;
    return static_cast<const uint32_t*>(p.mask)[piece.first_query + token] & draft;
}

}  // namespace paged_mla_decode
