// The threads and the shared memory of the kernel for few rows.
#pragma once
#include "../work.cuh"

namespace paged_mla_decode {

static_assert(ROWS == 16, "two row eights of a warp product");
constexpr int ROW_BYTES = 1 << ROW_BYTES_LOG2;  // of a token in a box, which is swizzled over as many bytes
constexpr int BOX_BYTES = TILE_TOKENS * ROW_BYTES;
constexpr int BOXES = (COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES;
constexpr int QUERY_PITCH = COLUMNS * 2 + 16;  // bytes between rows of queries in a stage: no two of eight in one bank
static_assert(ROWS * QUERY_PITCH <= STAGE_BYTES);

// Threads: consumers, whose warps have 64 columns of the output each, loaders, scorers, who have 16 keys of a tile each.
constexpr int CONSUMER_WARPS = CONSUMERS / 32;
constexpr int LOADER_WARPS = 4;
constexpr int SCORER_WARPS = TILE_TOKENS / 16;
constexpr int FIRST_LOADER = CONSUMERS;
constexpr int FIRST_SCORER = FIRST_LOADER + LOADER_WARPS * 32;
constexpr int THREADS = FIRST_SCORER + SCORER_WARPS * 32;
// Of a thread, in eights; a warpgroup that asks for more than the launch has waits for ever.
constexpr int CONSUMER_REGISTERS = 112;
constexpr int LOADER_REGISTERS = 48;
constexpr int SCORER_REGISTERS = 240;
static_assert(CONSUMERS * CONSUMER_REGISTERS + 32 * (LOADER_WARPS * LOADER_REGISTERS + SCORER_WARPS * SCORER_REGISTERS) <=
              THREADS * (65536 / THREADS / 8 * 8));

constexpr int SCORER_BARRIER = 2;

// A tile's P, in as many places.
constexpr int PLACES = 2;
struct Probabilities {
    uint4 fragment[SCORER_WARPS][32];  // of 16 keys, as the B operand of two row eights
    float factor[ROWS];                // of what was summed before, where `raised`
    uint32_t raised;
};

// What the scorers say of a tile's scores: whether any is too large for its maximum.
struct Checked {
    alignas(16) uint32_t over[SCORER_WARPS];
    alignas(8) uint64_t full;
};

struct Shared {
    alignas(1024) char ring[STAGES][STAGE_BYTES];  // queries of a piece, then its tiles
    alignas(16) Probabilities p[PLACES];
    Checked checked[PLACES];
    uint32_t visible[SCORER_WARPS][ROWS];
    float top[SCORER_WARPS][ROWS];
    float sum[SCORER_WARPS][ROWS];  // of a piece
    float maximum[ROWS];
    float query_power[ROWS];  // what the scores of a row are still to be multiplied by
    alignas(8) uint64_t full[STAGES];
    alignas(8) uint64_t empty[STAGES];
    alignas(8) uint64_t p_full[PLACES];
    alignas(8) uint64_t p_empty[PLACES];
    alignas(8) uint64_t sums_full;
    alignas(8) uint64_t sums_empty;
    Share share;
};
static_assert(STAGES * STAGE_BYTES >= CONSUMERS / 32 * MERGE_BYTES);
static_assert(sizeof(Shared) <= SHARED_BYTES, "the variant list states too little dynamic shared memory");

// This warp is through with something that the barrier stands for.
DEVICE void release(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

// Where 16 bytes of a token lie in a stage. Another 32 bytes of those of the same 32 are an XOR away, see step_place.
DEVICE uint32_t place_in_stage(int byte, int token) {
    const int swizzle = (ROW_BYTES == 128 ? token % 8 : token / 2 % 4) * 16;
    return byte / ROW_BYTES * BOX_BYTES + token * ROW_BYTES + (byte % ROW_BYTES ^ swizzle);
}

// From a place in the first 32 bytes of a row to the same one in those number `step`.
DEVICE uint32_t step_place(uint32_t first, int step) {
    return (first ^ (step * 32 % ROW_BYTES)) + step * 32 / ROW_BYTES * BOX_BYTES;
}

DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (KV_E4M3)
        mma_fp16_16x8x16(d, a, b0, b1);
    else
        mma_bf16_16x8x16(d, a, b0, b1);
}

DEVICE uint32_t pack_pair(float low, float high) { return KV_E4M3 ? pack_fp16(low, high) : pack_bf16(low, high); }

}  // namespace paged_mla_decode
