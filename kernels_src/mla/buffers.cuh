// What a CTA of the kernel whose consumers both score and multiply has in shared memory.
#pragma once
#include "layout.cuh"

namespace paged_mla_decode {

constexpr int BUFFERS = 2;

// Values are multiplied, and their boxes become free, in quarters of the columns: 0 and 1 are the first warpgroup's.
constexpr int QUARTERS = 4;
constexpr int QUARTER_BOXES = VALUE_BOXES / QUARTERS;
constexpr int QUARTER_COLUMNS = LATENT / QUARTERS;

// Barriers of a buffer's emptiness: of its quarters, and of the rope columns.
constexpr int EMPTIES = QUARTERS + 1;

// The i-th quarter of buffer `b` that the scores take, in about the order in which they become free.
DEVICE constexpr int quarter_of(int b, int i) { return (b == 0 ? 0x3210 : 0x1302) >> 4 * i & 3; }

// What the consumers do not ask for of the registers that the launch has. A warpgroup that asks for more than are there waits
// for ever.
constexpr int CONSUMER_REGISTERS = 232;
constexpr int HELPER_REGISTERS = (THREADS * LAUNCH_REGISTERS - CONSUMERS * CONSUMER_REGISTERS) / HELPERS / 8 * 8;
static_assert(HELPER_REGISTERS >= 40 && CONSUMERS * CONSUMER_REGISTERS + HELPERS * HELPER_REGISTERS <= THREADS * LAUNCH_REGISTERS);

struct Shared {
    alignas(1024) char q[BOXES][BOX_BYTES];
    alignas(1024) char kv[BUFFERS][BOXES][BOX_BYTES];
    alignas(1024) char p1[BOX_BYTES];
    Piece piece[2];  // in turn, there when its queries are; without parts: there is none
    float maximum[2][ROWS];
    float sum[2][ROWS];
    uint32_t grown[2][WARPGROUP / 32];  // whether a maximum of a warp's rows has
    alignas(8) uint64_t full[BUFFERS][BOXES];
    alignas(8) uint64_t empty[BUFFERS][EMPTIES];
    alignas(8) uint64_t q_full;
    alignas(8) uint64_t q_empty;
    Share share;
};

static_assert((1 + BUFFERS) * BOXES * BOX_BYTES >= CONSUMERS / 32 * MERGE_BYTES);
static_assert(sizeof(Shared) <= SHARED_BYTES, "the variant list states too little dynamic shared memory");

}  // namespace paged_mla_decode
