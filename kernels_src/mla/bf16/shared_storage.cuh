// Shared memory of the bf16 kernel, whose consumer warpgroups each compute scores and outputs.
#pragma once
#include "../warpgroups.cuh"

namespace paged_mla_decode {

constexpr int STAGES = 2;

// P V is computed, and the stage's boxes become free, in quarters of the columns: 0 and 1 belong to the first
// warpgroup.
constexpr int QUARTERS = 4;
constexpr int QUARTER_BOXES = VALUE_BOXES / QUARTERS;
constexpr int QUARTER_COLUMNS = OUTPUT_COLUMNS / QUARTERS;

// Empty barriers of a stage: one for each quarter, one for the rope columns.
constexpr int EMPTY_BARRIERS = QUARTERS + 1;

// The i-th quarter of stage `b` in the order in which Q K^T reads them, about that in which they become free.
DEVICE constexpr int quarter_of(int b, int i) { return (b == 0 ? 0x3210 : 0x1302) >> 4 * i & 3; }

// Consumers leave the other registers of the launch to the helpers. A warpgroup that asks for more than are available
// waits forever.
constexpr int CONSUMER_REGISTERS = 232;
constexpr int HELPER_REGISTERS = (THREADS * LAUNCH_REGISTERS - CONSUMERS * CONSUMER_REGISTERS) / HELPERS / 8 * 8;
static_assert(HELPER_REGISTERS >= 40 &&
              CONSUMERS * CONSUMER_REGISTERS + HELPERS * HELPER_REGISTERS <= THREADS * LAUNCH_REGISTERS);

struct SharedStorage {
    alignas(1024) char q[VALUE_BOXES + 1][BOX_BYTES];  // the last one: the rope columns, then P0
    alignas(1024) char kv[STAGES][BOXES][BOX_BYTES];
    alignas(1024) char p1[BOX_BYTES];
    WorkTile work[2];  // used in turn, valid with their queries; no splits: no more work
    float maximum[2][ROWS];
    float sum[2][ROWS];
    uint32_t raised[2][WARPGROUP / 32];  // whether a maximum of the warp's rows was raised
    alignas(8) uint64_t full[STAGES][BOXES];
    alignas(8) uint64_t empty[STAGES][EMPTY_BARRIERS];
    alignas(8) uint64_t q_full;
    alignas(8) uint64_t q_empty;
    WorkRange range;
};

static_assert((1 + STAGES) * BOXES * BOX_BYTES >= CONSUMERS / 32 * MERGE_BYTES);

}  // namespace paged_mla_decode
