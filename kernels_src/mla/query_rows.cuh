// 16-bit queries of a work tile into boxes in shared memory, 16 rows per warp.
#pragma once
#include "warpgroups.cuh"

namespace paged_mla_decode {

DEVICE const char* shuffle_pointer(const char* pointer, int lane) {
    return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(pointer), lane));
}

// Copies rows `first` to `first` + 7 of the tile and those STEP further, or only their rope boxes. Row R of a request
// is head R % heads of its query token R / heads; rows past the last one and columns past COLUMNS are zero.
template <int STEP>
DEVICE void copy_query_rows(const Params& p, const WorkTile& work, uint32_t to, int first, bool rope_only) {
    const int lane = threadIdx.x % 32;
    const auto row_of = [&](int i) { return first + i % 8 + i / 8 % 2 * STEP; };
    // Lane I holds where the I-th row begins, and lane I + 16 the same for its rope columns: these may lie in other
    // memory, but other code for them would have to be fetched from DRAM.
    const int own = row_of(lane);
    const char* const begin =
        first_query(p, 2, lane >= 16) + query_offset(p, work, own < work.rows ? own : 0, lane >= 16) * 2;
#pragma unroll 1
    for (int group = 0; group < 16; group += 4) {  // eight lanes per row
        const int i = group + lane / 8;
        const char* const latent = shuffle_pointer(begin, i) + lane % 8 * 16;
        const char* const rope = shuffle_pointer(begin, i + 16) + lane % 8 * 16;
        const int row = row_of(i);
        const bool exists = row < work.rows;
        const uint32_t address = to + row * 128 + ((lane % 8) ^ (row % 8)) * 16;
#pragma unroll
        for (int box = 0; box < KEY_BOXES; ++box)
            if (!rope_only || box >= ROPE_BOX)
                cp_async_16_zero_fill(address + box * BOX_BYTES,
                                      (box * BOX_COLUMNS < LATENT ? latent : rope) + box * 128,
                                      exists && box * BOX_COLUMNS + lane % 8 * 8 < COLUMNS ? 16 : 0);
    }
}

}  // namespace paged_mla_decode
