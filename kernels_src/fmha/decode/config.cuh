// Build options of paged decode (-D), the constants that follow from them, and the layout of shared memory.
#pragma once
#include "../../common/pipeline.cuh"
#include "../../common/stream_k.cuh"
#include "../../common/wgmma.cuh"
#include "KernelConstants.h"
#if USE_TMA && KV_E4M3
#include "PagedDecodeTmaE4m3Params.h"
using Params = PagedDecodeTmaE4m3Params;
#elif USE_TMA
#include "PagedDecodeTmaParams.h"
using Params = PagedDecodeTmaParams;
#elif KV_E4M3
#include "PagedDecodeCopyE4m3Params.h"
using Params = PagedDecodeCopyE4m3Params;
#else
#include "PagedDecodeCopyParams.h"
using Params = PagedDecodeCopyParams;
#endif

namespace paged_decode {

using stream_k::Request;
using stream_k::SplitSet;
using stream_k::WorkRange;

constexpr int CONSUMER_WARPS = 4 * CONSUMER_WARPGROUPS;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS;
#ifndef SEGMENTS
#define SEGMENTS 0
#endif
#if SEGMENTS && WARPGROUP_MMA
constexpr int KV_PARTITIONS = 1;  // all warpgroups multiply all keys; each has its own columns of the output
constexpr int STAGE_READERS = CONSUMER_WARPS;
#elif WARPGROUP_MMA
constexpr int KV_PARTITIONS = 64 * CONSUMER_WARPGROUPS / ROWS;  // warpgroups that take a work tile's KV tiles in turn
constexpr int STAGE_READERS = CONSUMER_WARPS / KV_PARTITIONS;  // warps that read a stage
#else
constexpr int KV_PARTITIONS = 4;  // warps that share a KV tile, each with 16 of every 64 tokens
constexpr int STAGE_READERS = CONSUMER_WARPS;
#endif
// setmaxnreg moves registers between whole warpgroups.
constexpr bool USES_SETMAXNREG = CONSUMER_WARPGROUPS > 1;
constexpr int PRODUCER_WARPS = USES_SETMAXNREG && !SEGMENTS ? 4 : 2;  // even warps load keys, odd ones values

// in warpgroup kernels; otherwise the products read the keys as they are
constexpr bool KEYS_CONVERTED = KV_E4M3 && !Q_E4M3;
constexpr bool CONVERTS = WARPGROUP_MMA && KV_E4M3;  // in a warpgroup of its own, see fp8_conversion.cuh
constexpr int CONVERTERS = CONVERTS ? 128 : 0;
constexpr int FIRST_CONVERTER = CONSUMERS + (USES_SETMAXNREG ? 128 : 32 * PRODUCER_WARPS);
constexpr int THREADS = FIRST_CONVERTER + CONVERTERS;
constexpr int CONSUMER_REGISTERS = CONVERTS ? 192 : 224, HELPER_REGISTERS = CONVERTS ? 64 : 56;
// Warpgroup kernels: row sums of P by a product with ones, where tensor cores have time for it. P is fp16; bf16 would
// be too coarse.
constexpr bool SUMS_BY_PRODUCT = CONVERTS && HEAD_DIM == 64 && !SEGMENTS;
constexpr int ITEM_BYTES = KV_E4M3 ? 1 : 2;
constexpr int TOKEN_BYTES = HEAD_DIM * ITEM_BYTES;
constexpr int SPAN = TOKEN_BYTES < 128 ? TOKEN_BYTES : 128;  // bytes of a token in one TMA box, which are swizzled
constexpr int SPANS = TOKEN_BYTES / SPAN;
constexpr int SPAN_BYTES = TILE_TOKENS * SPAN;
constexpr int STAGE_BYTES = SPANS * SPAN_BYTES;
// What products of warpgroups read: 64 head dims of a token, 16 bits each, with a 128-byte swizzle.
constexpr int PRODUCT_SPAN = 128, PRODUCT_SPAN_BYTES = TILE_TOKENS * PRODUCT_SPAN;

constexpr int K_STEPS = HEAD_DIM / 16;
#if !WARPGROUP_MMA
constexpr int ROW_TILES = ROWS / 8 / CONSUMER_WARPGROUPS;  // 8-row MMA tiles of a warp
// Queries stay in registers where that causes no spills.
constexpr bool QUERY_IN_SHARED = CONSUMER_WARPGROUPS > 1 || HEAD_DIM > 256 || (ROW_TILES > 1 && K_STEPS > 4);
#else
constexpr bool QUERY_IN_SHARED = false;
#endif

// Consumers that are short of registers keep the work range in shared memory.
constexpr bool RANGE_IN_SHARED = WARPGROUP_MMA || ROWS > 8 || (SEGMENTS && KV_E4M3);

// Padding by 4 floats avoids bank conflicts when fragments are written. With few rows each warp has a buffer of its
// own; with many, that would leave no room for a second CTA on the SM.
constexpr int MERGE_STRIDE = HEAD_DIM + 4;
constexpr int MERGE_BUFFERS = !SEGMENTS && ROWS == 8 && HEAD_DIM <= 128 ? KV_PARTITIONS : 1;
constexpr int ROWS_PER_WARP = ROWS / CONSUMER_WARPS;  // of the merged result
constexpr int CHUNKS = (HEAD_DIM + 127) / 128;  // of 128 head dims of a merged row: 4 per lane
// float4 that a thread merges at once, and partials whose loads are in flight together: as many as cause no spills.
constexpr int CELLS = ROWS_PER_WARP * CHUNKS == 4 ? 4 : 2;
constexpr int MERGE_BATCH = CELLS == 2 && ROWS <= 16 ? 8 : 2;
static_assert(ROWS_PER_WARP * CHUNKS % CELLS == 0, "cells are merged in equal groups");
constexpr int WEIGHTS = MERGE_BUFFERS * MERGE_STRIDE;  // partials whose weights fit into the merge buffers at once
constexpr int MERGE_LANES = 16;  // of a row, when statistics are merged
constexpr int LANES_PER_ROW = CONSUMERS / ROWS;  // threads that act as these lanes
static_assert(MERGE_LANES % LANES_PER_ROW == 0, "every row has the same number of lanes");

constexpr float MAXIMUM_SLACK = 8.f;  // base-2 exponent by which scores may exceed the row maximum in use
// mbarriers are initialised; the consumers, which do that, arrive and go on to CONSUMER_BARRIER
constexpr int PREPARED_BARRIER = 0;
constexpr int CONSUMER_BARRIER = 1;
// consumers and converters: the work tile is merged, its memory is free for converted tiles
constexpr int MERGED_BARRIER = 4;
constexpr int TURN = 5;  // and up, one for each of two warpgroups that issue products in turn
constexpr int NEVER_VISIBLE = 0x7fffffff;  // a first visible key beyond all keys

using DraftMask = uint64_t;  // bit j: a query token sees query token j of its request

// The first `count` query tokens, at most all 64.
DEVICE DraftMask first_drafts(int count) { return count > 0 ? ~DraftMask{0} >> (64 - count) : 0; }

// The rows of an output tile.
struct Rows {
    int q_begin;  // the request's first query token among all tokens
    int head;  // KV head
    int first;  // index of the CTA's row 0 among the request's rows for this head
    int count;  // rows that exist, up to ROWS
};

// KV tiles of one output tile, which one CTA computes.
struct WorkTile : stream_k::WorkTile {
    Rows rows;
    int row_tile;
    int begin;  // no row sees a key before this one
};

// Stages of converted tiles, a second pipeline: keys and values in turn, or values alone.
constexpr int CONVERTED_OF_TILE = KEYS_CONVERTED ? 2 : 1;
constexpr int CONVERTED_STAGES = SEGMENTS ? 2 * CONVERTED_OF_TILE : 2 * (CONVERTED_OF_TILE + 1);

#if SEGMENTS && !WARPGROUP_MMA
// What four warps that share rows tell each other of a KV tile; two are in use in turn.
struct Exchange {
    static constexpr int TEAM_ROWS = ROWS / CONSUMER_WARPGROUPS;
    alignas(16) uint16_t probability[2][TEAM_ROWS][TILE_TOKENS + 8];  // padding avoids bank conflicts
    float sum[2][TEAM_ROWS][33];  // of each warp's tokens by their number modulo 8
    float top[2][KV_PARTITIONS][TEAM_ROWS];  // each warp's largest score
    float2 raised[2][TEAM_ROWS];  // factor of what there is so far, new maximum
};

// What the warps tell each other of partials that are folded: each lane of a warp knows one.
struct Folding {
    alignas(16) float2 factor[32][ROWS];  // of what was folded before, and of the partial
    float sum[32][ROWS];  // of the partial
};
#endif

// Two warpgroups compute the scores of half of a tile's tokens each, and the output of half of the columns.
constexpr bool HALVES = SEGMENTS && WARPGROUP_MMA && CONSUMER_WARPGROUPS == 2 && ROWS == 64;

// What these warpgroups tell each other, but for probabilities.
struct HalfExchange {
    alignas(16) float4 sums[128];  // of a thread's rows and tokens modulo 8, over the first half
    float top[2][ROWS];  // each warpgroup's largest score
    float segment_sum[2][ROWS];  // by turns
};

// The output of earlier segments: with all of a row's columns in a thread, there are too few registers.
constexpr bool FOLDS_IN_SHARED = SEGMENTS && WARPGROUP_MMA && !HALVES;

constexpr int MERGED_ROWS = SEGMENTS && WARPGROUP_MMA ? 0 : ROWS;  // in shared memory

constexpr int RING_GROUPS = SEGMENTS && !WARPGROUP_MMA ? 2 : 0;  // of partials that are folded

struct alignas(128) SharedStorage {
    char stages[STAGES][STAGE_BYTES];  // dynamic shared memory begins at a multiple of 1024
    char query_tile[SEGMENTS && WARPGROUP_MMA ? ROWS * HEAD_DIM * 2 : 0];  // as the products read it, by spans
    union {
        // until the work tile's last KV tile
        char converted[CONVERTS ? CONVERTED_STAGES : 0][TILE_TOKENS * HEAD_DIM * 2];
        float merge[MERGE_BUFFERS][MERGED_ROWS][MERGE_STRIDE];
        float weight[MERGED_ROWS][WEIGHTS];
#if SEGMENTS && !WARPGROUP_MMA
        Exchange exchange[CONSUMER_WARPGROUPS];
        Folding folding;
#endif
    };
    float4 folded[FOLDS_IN_SHARED ? HEAD_DIM / 8 : 0][CONSUMERS];
    HalfExchange halves[HALVES ? 1 : 0];
    alignas(16) uint32_t ones[SUMS_BY_PRODUCT ? 64 : 0];
    uint2 query[QUERY_IN_SHARED ? ROWS / 8 : 0][K_STEPS][32];
    float partition_maximum[KV_PARTITIONS][MERGED_ROWS];
    float partition_sum[KV_PARTITIONS][MERGED_ROWS];
    float maximum[MERGED_ROWS];
    float sum[MERGED_ROWS];
    DraftMask row_mask[ROWS];
    int row_begin[ROWS];  // the first key in the row's window
#if !WARPGROUP_MMA
    // factor that undoes the scaling of the row's queries into fp16
    float row_unscale[KV_E4M3 && QUERY_IN_SHARED ? ROWS : 0];
#endif
    alignas(8) uint64_t full[STAGES];
    alignas(8) uint64_t empty[STAGES];
    alignas(8) uint64_t converted_full[CONVERTS ? CONVERTED_STAGES : 0];
    alignas(8) uint64_t converted_empty[CONVERTS ? CONVERTED_STAGES : 0];
    alignas(8) uint64_t cleared[WARPGROUP_MMA && !CONVERTS ? KV_PARTITIONS : 0];
    alignas(8) uint64_t partials_full[RING_GROUPS];
#if SEGMENTS
    int arrived_last;
#endif
    WorkRange range[RANGE_IN_SHARED ? 1 : 0];  // of the consumers
#if WARPGROUP_MMA
    Rows open_rows;  // the output tile of the latest partial that this CTA wrote, whose merge is pending
    SplitSet open_splits;
    uint32_t open_arrived;  // arrivals before this CTA's
    float open_output_scale[KV_E4M3 ? 1 : 0];
#endif
};

static_assert(STAGES >= 2, "K and V of a tile are in the pipeline together");
// Warpgroups that take KV tiles in turn may be a whole pass of the pipeline apart; a single warp must tell the passes
// of a stage apart.
static_assert(!WARPGROUP_MMA || STAGES % PRODUCER_WARPS == 0, "a stage is always filled by the same warp");

// Address of a token's 16 bytes number `column` in a swizzled stage, as the tensor map's 128-, 64- or 32-byte swizzle
// places them.
DEVICE uint32_t tile_address(uint32_t stage, int token, int column) {
    constexpr int COLUMNS = SPAN / 16;
    const int swizzle = SPAN == 128 ? token % 8 : SPAN == 64 ? token / 2 % 4 : token / 4 % 2;
    return stage + column / COLUMNS * SPAN_BYTES + token * SPAN + ((column % COLUMNS) ^ swizzle) * 16;
}

using StageState = PipelineState<STAGES>;
using ConvertedState = PipelineState<CONVERTED_STAGES>;

}  // namespace paged_decode
