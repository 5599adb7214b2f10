// Threads and shared memory of the kernel for few rows.
#pragma once
#include "../scheduler.cuh"
#if SPARSE
#include "../sparse/rows.cuh"
#endif

namespace paged_mla_decode {

static_assert((ROWS == 16 || (ROWS == 32 && SCALED)) && TILE_TOKENS == 64, "16 keys of each QK warp");
#if SPARSE
constexpr int STAGES_OF_TILE = 2;  // with half of its keys each
// Of so many QK warps, each multiplies its share of the columns and has its eight of the rows afterwards. Scaled keys
// are multiplied by a warpgroup, all columns.
constexpr int COLUMN_SHARES = SCALED ? 1 : 2, ROW_EIGHTS = ROWS / 8 / COLUMN_SHARES;
constexpr int STAGE_BYTES = TILE_TOKENS / STAGES_OF_TILE * KEY_PITCH, STAGE_ALIGNMENT = 16;
#else
constexpr int STAGES_OF_TILE = 1;
constexpr int COLUMN_SHARES = 1, ROW_EIGHTS = 2;
constexpr int ROW_BYTES = 1 << ROW_BYTES_LOG2;  // of a token in a box, and the span of the swizzle
constexpr int KEY_PITCH = ROW_BYTES;  // bytes between tokens in a box
constexpr int BOX_BYTES = TILE_TOKENS * ROW_BYTES;
constexpr int BOXES = (COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES, STAGE_ALIGNMENT = 1024;
#endif
// Queries take stages of the pipeline too, 16 rows each.
constexpr int QUERY_STAGES = ROWS / 16;
// bytes between rows of queries in a stage; no two of eight rows start in one bank
constexpr int QUERY_PITCH = COLUMNS * 2 + 16;
static_assert(16 * QUERY_PITCH <= STAGE_BYTES);
constexpr int QUERY_BOX_BYTES = ROWS * 128;  // 64 columns of all rows

// Threads: PV warps, each with 64 columns of the output (the consumers), producer warps, QK warps, each with 16 keys of
// a tile and one or two eights of the rows.
constexpr int CONSUMER_WARPS = CONSUMERS / 32;
constexpr int PRODUCER_WARPS = 4, STAGE_WARPS = PRODUCER_WARPS / STAGES_OF_TILE;  // that fill a stage together
constexpr int KEY_WARPS = TILE_TOKENS / 16;  // QK warps with the same rows
constexpr int QK_WARPS = KEY_WARPS * (ROWS / 8 / ROW_EIGHTS);
constexpr int FIRST_PRODUCER_THREAD = CONSUMERS;
constexpr int FIRST_QK_THREAD = FIRST_PRODUCER_THREAD + PRODUCER_WARPS * 32;
constexpr int THREADS = FIRST_QK_THREAD + QK_WARPS * 32;
// Of a thread, in multiples of 8. A warpgroup that asks for more than are available waits forever.
#if SPARSE
constexpr int CONSUMER_REGISTERS = SCALED ? (ROWS == 16 ? 120 : 144) : 88;
constexpr int PRODUCER_REGISTERS = SCALED ? 40 : 48;
constexpr int QK_REGISTERS = SCALED ? 184 : 128;
#else
constexpr int CONSUMER_REGISTERS = 112;
constexpr int PRODUCER_REGISTERS = 48;
constexpr int QK_REGISTERS = 240;
#endif
static_assert(CONSUMERS * CONSUMER_REGISTERS + 32 * (PRODUCER_WARPS * PRODUCER_REGISTERS + QK_WARPS * QK_REGISTERS) <=
              THREADS * (65536 / THREADS / 8 * 8));

constexpr int QK_BARRIER = 2;
constexpr int FIRST_SHARE_BARRIER = 3;  // of so many as there are KEY_WARPS
constexpr int QUERIES_BARRIER = FIRST_SHARE_BARRIER + KEY_WARPS;  // where PV warps give QK warps the first queries
// Where the warp that initialises barriers meets those of each role.
constexpr int FIRST_START_BARRIER = QUERIES_BARRIER + 1;

// A tile's P, in a pipeline of P_STAGES.
constexpr int P_STAGES = 2;
struct Probabilities {
    uint4 fragment[ROWS / 16][KEY_WARPS][32];  // of 16 keys, as the B operand for two groups of 8 rows
    float factor[ROWS];  // rescales earlier sums, if `raised`
    uint32_t raised;
#if SPARSE && KV_E4M3
    float block_factor[SCALE_BLOCKS];  // rescales earlier sums of the columns of a block, if `raised`
    uint16_t value_factor[SCALE_BLOCKS][TILE_TOKENS];  // fp16, by which P is multiplied for the columns of a block
#endif
};

// The QK warps' check of a tile's scores: whether any exceeds its row's maximum by too much.
struct ScoreCheck {
    alignas(16) uint32_t over[QK_WARPS];
    alignas(8) uint64_t full;
};

#if SPARSE
// 16 rows of the output of a CTA consist of groups, which are what a warp product adds to: 16 columns of 8 rows. A CTA
// of a cluster merges as many groups as any other; it is sent those of all CTAs, one CTA's after the other's, as lanes
// hold them.
constexpr int OUTPUT_GROUPS = LATENT / 16 * 2;
static_assert(MAX_CLUSTER <= 2 * CONSUMER_WARPS, "the groups of a warp are merged by at most two CTAs");
#endif

struct SharedStorage {
#if SPARSE && KV_E4M3
    alignas(1024) char q[COLUMNS / 64][QUERY_BOX_BYTES];  // as the B operand
#endif
    alignas(STAGE_ALIGNMENT) char stages[STAGES][STAGE_BYTES];  // the queries of a work tile, then its KV tiles
    alignas(16) Probabilities p[P_STAGES];
    ScoreCheck score_check[P_STAGES];
#if SPARSE
    uint32_t tile[STAGES];  // keys of the stage's tile (in both its stages), and LAST_TILE
    alignas(16) const void* rows_to_copy[ROW_RING];  // their addresses, in a ring
    alignas(16) float4 merge[OUTPUT_GROUPS][32];  // what the CTA merges
    // Of each CTA of the cluster the rows' maxima and sums, and then, in their place, by what its sums are multiplied
    // to be added to those of its neighbour, and with the first of two the weight of both.
    alignas(16) float2 row_parts[MAX_CLUSTER][ROWS];
    alignas(8) float part_weights[CTA_PARTS][ROWS];  // of the CTA's parts, if there are two
    alignas(8) float factor_out[ROWS];  // by which sums are multiplied at last
    alignas(8) uint64_t merge_full, merge_empty, row_parts_full, weights_full;
    uint64_t tile_done;  // by all CTAs of the cluster, an output tile
#if !KV_E4M3
    float4 partial_scores[QK_WARPS][32];  // of a QK warp's share of the columns, for another's rows
#else
    float top_scale[KEY_WARPS][SCALE_BLOCKS];
    float unit[SCALE_BLOCKS];  // of a work tile: outputs are multiples of it
#endif
#else
    uint32_t visible[QK_WARPS][ROWS];
#endif
    float top[KEY_WARPS][ROWS];
    float sum[KEY_WARPS][ROWS];  // of a work tile
    float maximum[ROWS];
    float query_scale[ROWS];  // by which the scores of a row are still to be multiplied
    alignas(8) uint64_t full[STAGES];
    alignas(8) uint64_t empty[STAGES];
    alignas(8) uint64_t p_full[P_STAGES];
    alignas(8) uint64_t p_empty[P_STAGES];
    alignas(8) uint64_t sums_full;
    alignas(8) uint64_t sums_empty;
#if !SPARSE
    WorkRange range;
#endif
};
#if !SPARSE
static_assert(STAGES * STAGE_BYTES >= CONSUMERS / 32 * MERGE_BYTES);
#endif

// Arrives for the warp, once all its lanes are here.
DEVICE void release(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

DEVICE void init_barriers(SharedStorage& shared) {
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared_address(&shared.full[i]), PRODUCER_WARPS / STAGES_OF_TILE);
        mbarrier_init(shared_address(&shared.empty[i]), CONSUMER_WARPS);
    }
    for (int i = 0; i < P_STAGES; ++i) {
        mbarrier_init(shared_address(&shared.score_check[i].full), QK_WARPS);
        mbarrier_init(shared_address(&shared.p_full[i]), QK_WARPS);
        mbarrier_init(shared_address(&shared.p_empty[i]), CONSUMER_WARPS);
    }
    mbarrier_init(shared_address(&shared.sums_full), QK_WARPS);
    mbarrier_init(shared_address(&shared.sums_empty), CONSUMER_WARPS);
#if SPARSE
    mbarrier_init(shared_address(&shared.merge_full), CONSUMER_WARPS);
    mbarrier_init(shared_address(&shared.merge_empty), CONSUMER_WARPS * gridDim.x);
    mbarrier_init(shared_address(&shared.row_parts_full), 1);
    mbarrier_init(shared_address(&shared.weights_full), 1);
    mbarrier_init(shared_address(&shared.tile_done), CONSUMER_WARPS * gridDim.x);
#endif
    fence_mbarrier_init();
}

#if SPARSE
DEVICE uint32_t stage_offset(int byte, int token) { return token * KEY_PITCH + byte; }
DEVICE uint32_t step_offset(uint32_t first, int step) { return first + step * 32; }
DEVICE uint32_t value_offset(uint32_t first, int step) { return first + step * 32; }
#else
// The offset of 16 bytes of a token in a stage. The other offsets in the same 32 bytes differ by an XOR, see
// step_offset.
DEVICE uint32_t stage_offset(int byte, int token) {
    const int swizzle = (ROW_BYTES == 128 ? token % 8 : token / 2 % 4) * 16;
    return byte / ROW_BYTES * BOX_BYTES + token * ROW_BYTES + (byte % ROW_BYTES ^ swizzle);
}

// From an offset in the first 32 bytes of a row to the same one in the 32 bytes number `step`.
DEVICE uint32_t step_offset(uint32_t first, int step) {
    return (first ^ (step * 32 % ROW_BYTES)) + step * 32 / ROW_BYTES * BOX_BYTES;
}

// The same in one box.
DEVICE uint32_t value_offset(uint32_t first, int step) { return first ^ (step * 32); }
#endif

DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (KV_E4M3)
        mma_fp16_16x8x16(d, a, b0, b1);
    else
        mma_bf16_16x8x16(d, a, b0, b1);
}

DEVICE uint32_t pack_pair(float low, float high) { return KV_E4M3 ? pack_fp16(low, high) : pack_bf16(low, high); }

}  // namespace paged_mla_decode
