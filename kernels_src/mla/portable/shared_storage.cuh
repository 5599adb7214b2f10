// Warps and shared memory of the portable kernel.
#pragma once
#include "../epilogue.cuh"

namespace paged_mla_decode {

static_assert(KV_E4M3 && ROWS == 64 && TILE_TOKENS == 32 && BOX_COLUMNS == 64 && CONSUMERS == 256, "shares of warps");
constexpr int WARPS = CONSUMERS / 32;
constexpr int ROW_TILES = ROWS / 16;  // of a warp product
constexpr int KEY_WARPS = WARPS / ROW_TILES;  // that share 16 rows, by keys
constexpr int KEYS = TILE_TOKENS / KEY_WARPS;  // of a tile, of a warp
constexpr int WARP_COLUMNS = OUTPUT_COLUMNS / WARPS;  // of the output
static_assert(KEYS == 16 && WARP_COLUMNS == SCALE_COLUMNS);

// TMA fills what lies behind the columns of a key with zeros.
constexpr int BOXES = (PADDED ? OUTPUT_COLUMNS : COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS;
constexpr int ROW_BYTES = BOX_COLUMNS;  // of a key or a query in a box
constexpr int KV_BOX_BYTES = TILE_TOKENS * ROW_BYTES;
constexpr int QUERY_BOX_BYTES = ROWS * ROW_BYTES;
constexpr int P_ROW_BYTES = TILE_TOKENS * 2;
static_assert(P_ROW_BYTES == ROW_BYTES, "one swizzle for all");

struct SharedStorage {
    alignas(1024) char kv[STAGES][BOXES][KV_BOX_BYTES];
    alignas(1024) char q[BOXES][QUERY_BOX_BYTES];
    alignas(1024) char p[ROWS * P_ROW_BYTES];
    float top[KEY_WARPS][ROWS];  // a tile's maxima; behind the last tile, the sums
    float factor[ROWS];  // rescales the output so far, where a maximum was raised
    float maximum[ROWS];  // behind the last tile
    uint32_t raised[ROW_TILES];  // whether a maximum was raised among these 16 rows
    alignas(8) uint64_t full[STAGES];
    WorkRange range;
};
static_assert(sizeof(SharedStorage::kv) + sizeof(SharedStorage::q) >= WARPS * MERGE_BYTES);
static_assert(sizeof(SharedStorage) <= 99 << 10, "what a CTA of SM120 can have");

// The offset of 16 bytes of a row in 64-byte rows with the 64-byte swizzle.
DEVICE uint32_t swizzled_offset(int row, int chunk) { return row * ROW_BYTES + (chunk ^ (row / 2 % 4)) * 16; }

}  // namespace paged_mla_decode
