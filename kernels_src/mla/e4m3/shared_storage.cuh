// Shared memory of the kernels for an e4m3 cache, and the pipelines between their warpgroups.
#pragma once
#include "../warpgroups.cuh"
#if SPARSE
#include "../sparse/rows.cuh"
#endif

namespace paged_mla_decode {

#if SPARSE
// A tile takes four stages, each of the 16 keys of a QK warp and of a step of the PV product, which release it soon:
// the time of a tile follows from the keys that are in flight.
constexpr int STAGE_KEYS = 16, TILE_STAGES = TILE_TOKENS / STAGE_KEYS;
constexpr int LIST_WARPS = 2;  // of which each fills every second stage
#elif SEPARATE_VALUES
constexpr int STAGES = 2;
constexpr int FIRST_VALUE_BOX = BOXES, TILE_BOXES = BOXES + VALUE_BOXES;
#else
constexpr int STAGES = LATENT > 256 ? (Q_E4M3 ? 5 : 3) : (Q_E4M3 ? 8 : 7);  // of e4m3 tiles
constexpr int FIRST_VALUE_BOX = 0, TILE_BOXES = BOXES;
#endif
constexpr int P_STAGES = SCALED ? 2 : 3;  // of P
constexpr int RAW_BOX_BYTES = TILE_TOKENS * BOX_COLUMNS;
// Queries in shared memory: e4m3 queries as they are, those that do not fit into registers; bf16 queries converted to
// fp16, all.
constexpr int QUERY_BOXES = Q_E4M3 ? (COLUMNS < 4 * BOX_COLUMNS ? COLUMNS / BOX_COLUMNS : 4) : KEY_BOXES;
constexpr int QUERY_BOX_BYTES = Q_E4M3 ? RAW_BOX_BYTES : BOX_BYTES;

// What ends with a tile.
enum Boundary : int { INSIDE, END_OF_OUTPUT_TILE, END_OF_SPLIT, END_OF_RANGE };

// What goes with the P of a tile.
struct TileHandoff {
    // Whether a row maximum was raised: for each 16 rows, or of any row, then 0.
    alignas(16) uint32_t raised[4];
    int valid;  // keys of the tile; 0: no tile, since the request has no keys
    Boundary end;
    int slot, rows, counter;  // of a partial
    alignas(16) float factor[ROWS];  // rescales the outputs so far, where a maximum was raised
    float factor_out[ROWS];  // of an output tile that is not split: factors of its rows' outputs,
    int64_t offset_out[ROWS];  // and their offsets; -1: there is no such row
#if SPARSE
    uint16_t value_factor[SCALE_BLOCKS][TILE_TOKENS];  // fp16, of the columns of a block of each key
#endif
};

#if SPARSE
// Of two neighbouring rows: what a score is multiplied by, and the maximum that P is relative to.
struct alignas(16) RowPair {
    float scale[2], maximum[2];
};
#else
// With bf16 queries:
constexpr int SOFTMAX_WARPS = 2;
constexpr int SCORE_PITCH = TILE_TOKENS * 4 + 16;  // bytes of a row of scores, padded against bank conflicts
#endif

struct SharedStorage {
    alignas(1024) char p[P_STAGES][BOX_BYTES];
#if SPARSE
    alignas(1024) char kv[STAGES][STAGE_KEYS * KEY_PITCH];
    uint32_t tile[STAGES];  // keys of the stage's tile, and LAST_TILE
    alignas(16) const void* rows_to_copy[ROW_RING];  // their addresses, in a ring
#else
    alignas(1024) char kv[STAGES][TILE_BOXES][RAW_BOX_BYTES];
#endif
    alignas(1024) char q[QUERY_BOXES][QUERY_BOX_BYTES];
    TileHandoff handoff[P_STAGES];
#if SPARSE
    RowPair rows[ROWS / 2];  // of a work tile
    float row_parts[WARPGROUP / 32][ROWS];  // each QK warp's maxima of a tile, or sums of a work tile
#elif !Q_E4M3
    alignas(16) char scores[ROWS * SCORE_PITCH];
    WorkTile work[SOFTMAX_WARPS];
    float scale[2][ROWS];  // of the scores of a row, for work tiles in turn
    alignas(8) uint64_t scores_full;
    alignas(8) uint64_t scores_empty;
#endif
    alignas(8) uint64_t full[STAGES];
    alignas(8) uint64_t empty[STAGES];
    alignas(8) uint64_t p_full[P_STAGES];
    alignas(8) uint64_t p_empty[P_STAGES];
    WorkRange range;
};

static_assert(sizeof(SharedStorage::p) + sizeof(SharedStorage::kv) >= CONSUMERS / 32 * MERGE_BYTES);

DEVICE void arrive_for_warp(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

}  // namespace paged_mla_decode
