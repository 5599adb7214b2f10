// What a CTA of the kernels for an e4m3 cache has in shared memory, and the rings through which its warpgroups hand it on.
#pragma once
#include "layout.cuh"

namespace paged_mla_decode {

constexpr int BUFFERS = LATENT > 256 ? (Q_E4M3 ? 5 : 3) : (Q_E4M3 ? 8 : 7);  // of raw tiles
constexpr int HANDOVERS = 3;                                               // of probabilities
constexpr int RAW_BOX_BYTES = TILE_TOKENS * BOX_COLUMNS;
// Of the queries that are in shared memory: e4m3 as they are, those for which the registers have no room; bf16 as fp16, all.
constexpr int QUERY_BOXES = Q_E4M3 ? 4 : BOXES;
constexpr int QUERY_BOX_BYTES = Q_E4M3 ? RAW_BOX_BYTES : BOX_BYTES;

// What a tile ends.
enum End : int { NOTHING_ENDS, WHOLE_PIECE_ENDS, PART_ENDS, ALL_ENDS };

// What the scoring warpgroup says beside P.
struct Handover {
    alignas(16) uint32_t grown[4];  // by its warps: whether a maximum of theirs has grown
    int valid;                      // keys of the tile; 0: no tile, the request has none
    End end;
    int slot, rows, counter;         // of a part
    alignas(16) float factor[ROWS];  // by which outputs so far are to be multiplied if a maximum has grown
    float factor_out[ROWS];          // of a whole piece: that of its rows' outputs,
    int64_t offset_out[ROWS];        // and where they go; -1: there is no such row
};

// Beside bf16 queries.
constexpr int SOFTMAX_WARPS = ROWS / 32;
constexpr int SCORE_PITCH = TILE_TOKENS * 4 + 16;  // bytes of a row of scores: what a warp writes or reads is in different banks

struct Shared {
    alignas(1024) char p[HANDOVERS][BOX_BYTES];
    alignas(1024) char kv[BUFFERS][BOXES][RAW_BOX_BYTES];
    alignas(1024) char q[QUERY_BOXES][QUERY_BOX_BYTES];
    Handover handover[HANDOVERS];
#if !Q_E4M3
    alignas(16) char scores[ROWS * SCORE_PITCH];
    Piece piece[SOFTMAX_WARPS];
    float scale[2][ROWS];  // of the scores of a row, of pieces in turn
    alignas(8) uint64_t scores_full;
    alignas(8) uint64_t scores_empty;
#endif
    alignas(8) uint64_t full[BUFFERS];
    alignas(8) uint64_t empty[BUFFERS];
    alignas(8) uint64_t p_full[HANDOVERS];
    alignas(8) uint64_t p_empty[HANDOVERS];
    Share share;
};

static_assert(BUFFERS * BOXES * RAW_BOX_BYTES >= CONSUMERS / 32 * MERGE_BYTES);
static_assert(sizeof(Shared) <= SHARED_BYTES, "the variant list states too little dynamic shared memory");

DEVICE void arrive_for_warp(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

// The same in all lanes, and the compiler knows it: operands of products are in uniform registers then.
DEVICE uint32_t uniform(uint32_t value) { return __shfl_sync(~0u, value, 0); }

}  // namespace paged_mla_decode
