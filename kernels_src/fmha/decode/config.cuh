// What a build of paged decode fixes (its -D options), what follows from it, and the block's shared memory.
#pragma once
#include "../../common/wgmma.cuh"
#include "KernelConstants.h"
#if USE_TMA
#include "PagedDecodeTmaParams.h"
using Params = PagedDecodeTmaParams;
#else
#include "PagedDecodeCopyParams.h"
using Params = PagedDecodeCopyParams;
#endif

namespace paged_decode {

constexpr int CONSUMER_WARPS = 4 * CONSUMER_WARPGROUPS;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS;
#if WARPGROUP_MMA
constexpr int PARTIES = 64 * CONSUMER_WARPGROUPS / ROWS;  // warpgroups that take a piece's tiles in turn
constexpr int BUFFER_READERS = CONSUMER_WARPS / PARTIES;  // warps that read a buffer
#else
constexpr int PARTIES = 4;  // warps that share a tile, each with 16 of every 64 tokens
constexpr int BUFFER_READERS = CONSUMER_WARPS;
#endif
// Registers are handed over by whole warpgroups.
constexpr bool HANDS_OVER_REGISTERS = CONSUMER_WARPGROUPS > 1;
constexpr int PRODUCER_WARPS = HANDS_OVER_REGISTERS ? 4 : 2;  // even ones bring keys, odd ones values

constexpr bool KEYS_CONVERTED = KV_E4M3 && !Q_E4M3;  // for warpgroups: else their products take keys as they are
constexpr bool CONVERTS = WARPGROUP_MMA && KV_E4M3;  // a warpgroup of its own, see converting.cuh
constexpr int CONVERTERS = CONVERTS ? 128 : 0;
constexpr int FIRST_CONVERTER = CONSUMERS + 32 * PRODUCER_WARPS;
constexpr int THREADS = FIRST_CONVERTER + CONVERTERS;
constexpr int CONSUMER_REGISTERS = CONVERTS ? 192 : 224, HELPER_REGISTERS = CONVERTS ? 64 : 56;
// Of warpgroups: a product with ones adds up rows of P, as fp16 (bf16 would be too coarse), where products have time for it.
constexpr bool SUMS_BY_PRODUCT = CONVERTS && HEAD_DIM == 64;
constexpr int ITEM_BYTES = KV_E4M3 ? 1 : 2;
constexpr int TOKEN_BYTES = HEAD_DIM * ITEM_BYTES;
constexpr int SPAN = TOKEN_BYTES < 128 ? TOKEN_BYTES : 128;  // bytes of a token that one box holds, swizzled
constexpr int SPANS = TOKEN_BYTES / SPAN;
constexpr int SPAN_BYTES = TILE_TOKENS * SPAN;
constexpr int BUFFER_BYTES = SPANS * SPAN_BYTES;

constexpr int DEPTH_STEPS = HEAD_DIM / 16;
#if !WARPGROUP_MMA
constexpr int ROW_TILES = ROWS / 8 / CONSUMER_WARPGROUPS;  // 8-row MMA tiles of a warp
// Few and short rows keep the queries in registers, if nothing spills for it.
constexpr bool QUERY_IN_SHARED =
    CONSUMER_WARPGROUPS > 1 || HEAD_DIM > 256 || (ROW_TILES > 1 && DEPTH_STEPS > 4);
#else
constexpr bool QUERY_IN_SHARED = false;
#endif

// Consumers whose registers are short look their share up.
constexpr bool SHARE_IN_SHARED = WARPGROUP_MMA || ROWS > 8;

// 4 floats more than a row keep the fragments' writes free of bank conflicts. With few rows each warp has a buffer of its
// own; with many, that would cost the second CTA on the SM.
constexpr int MERGE_STRIDE = HEAD_DIM + 4;
constexpr int MERGE_BUFFERS = ROWS == 8 && HEAD_DIM <= 128 ? PARTIES : 1;
constexpr int ROWS_PER_WARP = ROWS / CONSUMER_WARPS;  // of the merged result
constexpr int CHUNKS = (HEAD_DIM + 127) / 128;        // of a merged row: 4 head dims a lane
// float4 that a thread merges at once, and partials whose loads are in flight together, without spills.
constexpr int CELLS = ROWS_PER_WARP * CHUNKS == 4 ? 4 : 2;
constexpr int MERGE_BATCH = CELLS == 2 && ROWS <= 16 ? 8 : 2;
static_assert(ROWS_PER_WARP * CHUNKS % CELLS == 0, "cells are merged in equal groups");
constexpr int WEIGHTS = MERGE_BUFFERS * MERGE_STRIDE;  // partials whose weights fit the merge buffers at once
constexpr int MERGE_LANES = 16;                        // of a row, when statistics are merged
constexpr int LANES_PER_ROW = CONSUMERS / ROWS;        // threads that are these lanes
static_assert(MERGE_LANES % LANES_PER_ROW == 0, "every row has the same number of lanes");

// One request as the launch sees it, clamped to its bounds.
struct Request {
    int index;
    int length;      // keys
    int q_start;     // its first query token among all
    int q_len;       // query tokens
    int first_tile;  // of its keys; with a window, tiles in front of it are left out
    int tiles;       // a request without keys still owns one (empty) tile, whose CTA writes its output
    int row_tiles;
    // Of `cta_group_size` (KV head, row tile) pairs.
    DEVICE int blocks(const Params& p) const { return p.head_groups * row_tiles; }
};

// A team's share of the line of all tiles; see work.cuh.
struct Share {
    int team, member;  // the CTA is one of `cta_group_size` in its team
    int tiles;         // on the line, of the share; if none, what it begins with is not known
    Request request;   // where the share begins: request, block of its pairs, tile
    int block, first;
    int block_start;   // index of that block's tile 0 on the line
    int total, teams;  // tiles in all, teams that have any
};

constexpr float MAXIMUM_SLACK = 8.f;  // base-2 exponents by which scores may exceed the maximum in use
constexpr int PREPARED_BARRIER = 0;  // mbarriers are initialised: consumers, who do that, go on to CONSUMER_BARRIER
constexpr int CONSUMER_BARRIER = 1;
constexpr int MERGED_BARRIER = 4;  // of consumers and converters: a piece is merged, its memory is free for converted tiles
constexpr int NEVER = 0x7fffffff;  // a first visible key that no key reaches

// The rows of a pair: which queries they are.
struct Rows {
    int q_start;  // the request's first query token among all
    int head;     // KV head
    int first;    // flat row of the request and head that is row 0 of the CTA
    int count;    // of ROWS, those that exist
};

// Where the parts of a split pair lie in the workspace, in the order in which they are added.
struct Parts {
    int count;    // 1: the pair is whole, nothing goes through the workspace
    int own;      // which of them this CTA has
    int counter;  // of arrivals
    int base, step, odd_first;
    DEVICE int slot(int part) const { return base + part * step + (part == 0 ? odd_first : 0); }
};

// Buffers of converted tiles, a second ring: keys and values by turns, or values alone.
constexpr int CONVERTED_OF_TILE = KEYS_CONVERTED ? 2 : 1;
constexpr int CONVERTED_BUFFERS = 2 * (CONVERTED_OF_TILE + 1);

struct alignas(128) Shared {
    char ring[BUFFERS][BUFFER_BYTES];  // the block's shared memory begins at a multiple of 1024
    union {
        char converted[CONVERTS ? CONVERTED_BUFFERS : 0][TILE_TOKENS * HEAD_DIM * 2];  // while there are tiles
        float merge[MERGE_BUFFERS][ROWS][MERGE_STRIDE];
        float weight[ROWS][WEIGHTS];
    };
    alignas(16) uint32_t ones[SUMS_BY_PRODUCT ? 64 : 0];
    uint2 query[QUERY_IN_SHARED ? ROWS / 8 : 1][QUERY_IN_SHARED ? DEPTH_STEPS : 1][QUERY_IN_SHARED ? 32 : 1];
    float party_maximum[PARTIES][ROWS];
    float party_sum[PARTIES][ROWS];
    float maximum[ROWS];
    float sum[ROWS];
    uint32_t row_mask[ROWS];                  // bit j: the row sees draft token j
    int row_begin[ROWS];                      // the first key in the row's window
#if !WARPGROUP_MMA
    float row_undo[KV_E4M3 && QUERY_IN_SHARED ? ROWS : 0];  // what brings the row's scores back from its queries' way into fp16
#endif
    alignas(8) uint64_t full[BUFFERS];
    alignas(8) uint64_t empty[BUFFERS];
    alignas(8) uint64_t converted_full[CONVERTS ? CONVERTED_BUFFERS : 0];
    alignas(8) uint64_t converted_empty[CONVERTS ? CONVERTED_BUFFERS : 0];
    alignas(8) uint64_t cleared[WARPGROUP_MMA && !CONVERTS ? PARTIES : 0];
    int arrived_last;
    Share share[SHARE_IN_SHARED ? 1 : 0];  // of the consumers
#if WARPGROUP_MMA
    Rows open_rows;  // the pair of which this CTA wrote a part last
    Parts open_parts;
    uint32_t open_arrived;  // who had arrived there before
#endif
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the variant list states another size of dynamic shared memory");
static_assert(BUFFERS >= 2, "K and V of a tile are in the ring together");
// Warpgroups that take tiles in turn may be rounds of the ring apart: a buffer's rounds are told apart by one warp alone.
static_assert(!WARPGROUP_MMA || BUFFERS % PRODUCER_WARPS == 0, "a buffer is always filled by the same warp");

// Address of 16 bytes of a token in a swizzled buffer, as the tensor map's 128-, 64- or 32-byte pattern places them.
DEVICE uint32_t tile_address(uint32_t buffer, int token, int column) {
    constexpr int COLUMNS = SPAN / 16;
    const int turn = SPAN == 128 ? token % 8 : SPAN == 64 ? token / 2 % 4 : token / 4 % 2;
    return buffer + column / COLUMNS * SPAN_BYTES + token * SPAN + ((column % COLUMNS) ^ turn) * 16;
}

// Position in a ring; the phase flips each time around.
template <int SIZE>
struct Cursor {
    int index = 0;
    uint32_t phase = 0;
    DEVICE void advance(int steps = 1) {  // at most once around
        index += steps;
        if (index >= SIZE) {
            index -= SIZE;
            phase ^= 1;
        }
    }
    DEVICE void advance_far(uint32_t steps) {
        phase ^= steps / SIZE & 1;
        advance(steps % SIZE);
    }
};
using RingCursor = Cursor<BUFFERS>;
using ConvertedCursor = Cursor<CONVERTED_BUFFERS>;

}  // namespace paged_decode
