// Threads and shared memory of the kernel for few rows.
#pragma once
#include "../scheduler.cuh"
#if SPARSE
#include "../sparse/rows.cuh"
#endif

namespace paged_mla_decode {

static_assert(ROWS == 16 && TILE_TOKENS == 64, "two row eights of a warp product, 16 keys of each QK warp");
#if SPARSE
constexpr int STAGE_BYTES = TILE_TOKENS * KEY_PITCH;
#else
constexpr int ROW_BYTES = 1 << ROW_BYTES_LOG2;  // of a token in a box, and the span of the swizzle
constexpr int KEY_PITCH = ROW_BYTES;  // bytes between tokens in a box
constexpr int BOX_BYTES = TILE_TOKENS * ROW_BYTES;
constexpr int BOXES = (COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES;
#endif
// bytes between rows of queries in a stage; no two of eight rows start in one bank
constexpr int QUERY_PITCH = COLUMNS * 2 + 16;
static_assert(ROWS * QUERY_PITCH <= STAGE_BYTES);

// Threads: PV warps, each with 64 columns of the output (the consumers), producer warps, QK warps, each with 16 keys of
// a tile.
constexpr int CONSUMER_WARPS = CONSUMERS / 32;
constexpr int PRODUCER_WARPS = 4;
constexpr int QK_WARPS = TILE_TOKENS / 16;
constexpr int FIRST_PRODUCER_THREAD = CONSUMERS;
constexpr int FIRST_QK_THREAD = FIRST_PRODUCER_THREAD + PRODUCER_WARPS * 32;
constexpr int THREADS = FIRST_QK_THREAD + QK_WARPS * 32;
// Of a thread, in multiples of 8. A warpgroup that asks for more than are available waits forever.
constexpr int CONSUMER_REGISTERS = 112;
constexpr int PRODUCER_REGISTERS = 48;
constexpr int QK_REGISTERS = 240;
static_assert(CONSUMERS * CONSUMER_REGISTERS + 32 * (PRODUCER_WARPS * PRODUCER_REGISTERS + QK_WARPS * QK_REGISTERS) <=
              THREADS * (65536 / THREADS / 8 * 8));

constexpr int QK_BARRIER = 2;

// A tile's P, in a pipeline of P_STAGES.
constexpr int P_STAGES = 2;
struct Probabilities {
    uint4 fragment[QK_WARPS][32];  // of 16 keys, as the B operand for two groups of 8 rows
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

struct SharedStorage {
    alignas(1024) char stages[STAGES][STAGE_BYTES];  // the queries of a work tile, then its KV tiles
    alignas(16) Probabilities p[P_STAGES];
    ScoreCheck score_check[P_STAGES];
#if SPARSE
    uint32_t tile[STAGES];  // keys of the stage's tile, and LAST_TILE
    int slots[PRODUCER_WARPS][SLOT_RING];  // rows that are still to be copied, in a ring
#if KV_E4M3
    float top_scale[QK_WARPS][SCALE_BLOCKS];
    float unit[SCALE_BLOCKS];  // of a work tile: outputs are multiples of it
#endif
#else
    uint32_t visible[QK_WARPS][ROWS];
#endif
    float top[QK_WARPS][ROWS];
    float sum[QK_WARPS][ROWS];  // of a work tile
    float maximum[ROWS];
    float query_scale[ROWS];  // by which the scores of a row are still to be multiplied
    alignas(8) uint64_t full[STAGES];
    alignas(8) uint64_t empty[STAGES];
    alignas(8) uint64_t p_full[P_STAGES];
    alignas(8) uint64_t p_empty[P_STAGES];
    alignas(8) uint64_t sums_full;
    alignas(8) uint64_t sums_empty;
    WorkRange range;
};
static_assert(STAGES * STAGE_BYTES >= CONSUMERS / 32 * MERGE_BYTES);

// Arrives for the warp, once all its lanes are here.
DEVICE void release(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

DEVICE void init_barriers(SharedStorage& shared) {
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared_address(&shared.full[i]), PRODUCER_WARPS);
        mbarrier_init(shared_address(&shared.empty[i]), CONSUMER_WARPS);
    }
    for (int i = 0; i < P_STAGES; ++i) {
        mbarrier_init(shared_address(&shared.score_check[i].full), QK_WARPS);
        mbarrier_init(shared_address(&shared.p_full[i]), QK_WARPS);
        mbarrier_init(shared_address(&shared.p_empty[i]), CONSUMER_WARPS);
    }
    mbarrier_init(shared_address(&shared.sums_full), QK_WARPS);
    mbarrier_init(shared_address(&shared.sums_empty), CONSUMER_WARPS);
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
