// Threads of the kernels that multiply by warpgroups, of which two are consumers, and the boxes of their tiles.
#pragma once
#include "scheduler.cuh"

namespace paged_mla_decode {

static_assert(TILE_TOKENS == 64 && BOX_COLUMNS == 64 && CONSUMERS == 256, "warpgroup products");
static_assert(ROWS == 64 || SCALED, "only S^T and O^T have rows along N");
static_assert(ROPE <= BOX_COLUMNS && ROPE % 32 == 0, "the rope columns are a box or a part of one");
constexpr int BOX_BYTES = ROWS * 128;  // rows of 64 16-bit numbers, 128-byte swizzle
constexpr int VALUE_BOXES = OUTPUT_COLUMNS / BOX_COLUMNS;
constexpr int KEY_BOXES = (COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS;
constexpr int BOXES = PADDED ? VALUE_BOXES : KEY_BOXES;  // TMA fills what lies behind the columns of a key with zeros
constexpr int ROPE_BOX = VALUE_BOXES;  // if there is one
constexpr int ROPE_BOXES = BOXES - VALUE_BOXES;
constexpr int HALF_BOXES = VALUE_BOXES / 2;  // each consumer warpgroup has one half of the output's columns
constexpr int HALF_COLUMNS = OUTPUT_COLUMNS / 2;

constexpr int WARPGROUP = 128;
constexpr int HELPERS = (KV_E4M3 ? 2 : 1) * WARPGROUP;
constexpr int THREADS = CONSUMERS + HELPERS;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;  // of a thread at launch, a multiple of eight

}  // namespace paged_mla_decode
