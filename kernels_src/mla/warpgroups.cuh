// Threads of the kernels that multiply by warpgroups, of which two are consumers, and the boxes of their tiles.
#pragma once
#include "scheduler.cuh"

namespace paged_mla_decode {

static_assert(TILE_TOKENS == 64 && BOX_COLUMNS == 64 && CONSUMERS == 256, "warpgroup products");
static_assert(ROWS == 64 || SCALED, "only S^T and O^T have rows along N");
static_assert(MLA_ROPE_COLUMNS == BOX_COLUMNS, "the rope columns are a box");
constexpr int BOX_BYTES = ROWS * 128;  // rows of 64 16-bit numbers, 128-byte swizzle
constexpr int VALUE_BOXES = LATENT / BOX_COLUMNS;
constexpr int BOXES = VALUE_BOXES + 1;  // and the rope columns
constexpr int ROPE_BOX = VALUE_BOXES;
constexpr int HALF_BOXES = VALUE_BOXES / 2;  // each consumer warpgroup has one half of the output's columns
constexpr int HALF_COLUMNS = LATENT / 2;

constexpr int WARPGROUP = 128;
constexpr int HELPERS = (KV_E4M3 ? 2 : 1) * WARPGROUP;
constexpr int THREADS = CONSUMERS + HELPERS;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;  // of a thread at launch, a multiple of eight

}  // namespace paged_mla_decode
