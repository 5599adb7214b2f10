// Shared memory of the kernels for an e4m3 cache, and the pipelines between their warpgroups.
#pragma once
#include "../rows64.cuh"

namespace paged_mla_decode {

constexpr int STAGES = LATENT > 256 ? (Q_E4M3 ? 5 : 3) : (Q_E4M3 ? 8 : 7);  // of e4m3 tiles
constexpr int P_STAGES = 3;  // of P
constexpr int RAW_BOX_BYTES = TILE_TOKENS * BOX_COLUMNS;
// Queries in shared memory: e4m3 queries as they are, those that do not fit into registers; bf16 queries converted to
// fp16, all.
constexpr int QUERY_BOXES = Q_E4M3 ? 4 : BOXES;
constexpr int QUERY_BOX_BYTES = Q_E4M3 ? RAW_BOX_BYTES : BOX_BYTES;

// What ends with a tile.
enum Boundary : int { INSIDE, END_OF_OUTPUT_TILE, END_OF_SPLIT, END_OF_RANGE };

// What goes with the P of a tile.
struct TileHandoff {
    alignas(16) uint32_t raised[4];  // for each 16 rows: whether a row maximum was raised
    int valid;  // keys of the tile; 0: no tile, since the request has no keys
    Boundary end;
    int slot, rows, counter;  // of a partial
    alignas(16) float factor[ROWS];  // rescales the outputs so far, where a maximum was raised
    float factor_out[ROWS];  // of an output tile that is not split: factors of its rows' outputs,
    int64_t offset_out[ROWS];  // and their offsets; -1: there is no such row
};

// With bf16 queries:
constexpr int SOFTMAX_WARPS = ROWS / 32;
constexpr int SCORE_PITCH = TILE_TOKENS * 4 + 16;  // bytes of a row of scores, padded against bank conflicts

struct SharedStorage {
    alignas(1024) char p[P_STAGES][BOX_BYTES];
    alignas(1024) char kv[STAGES][BOXES][RAW_BOX_BYTES];
    alignas(1024) char q[QUERY_BOXES][QUERY_BOX_BYTES];
    TileHandoff handoff[P_STAGES];
#if !Q_E4M3
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

static_assert(STAGES * BOXES * RAW_BOX_BYTES >= CONSUMERS / 32 * MERGE_BYTES);

DEVICE void arrive_for_warp(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

// Warp-uniform in a way that the compiler recognises, so that operands of products are in uniform registers.
DEVICE uint32_t warp_uniform(uint32_t value) { return __shfl_sync(~0u, value, 0); }

}  // namespace paged_mla_decode
