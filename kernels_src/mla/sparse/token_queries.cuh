// bf16 queries of a work tile into boxes in shared memory.
#pragma once
#include "../warpgroups.cuh"

namespace paged_mla_decode {

// With four lanes of a warpgroup per row. Rows past the last one are zero.
DEVICE void copy_rows_of_token(const Params& p, const WorkTile& work, uint32_t to, uint32_t thread) {
    constexpr int CHUNKS = KEY_BOXES * 8;
#pragma unroll 1
    for (int row = thread / 4; row < ROWS; row += WARPGROUP / 4) {
        const bool exists = row < work.rows;
        const char* source = static_cast<const char*>(p.q) + thread % 4 * 16;
        source += 2 * row_offset(work, exists ? row : 0, p.heads, p.q_token_stride, p.q_head_stride);
        const uint32_t address = to + row * 128;
#pragma unroll 6
        for (int i = 0; i < CHUNKS / 4; ++i)
            cp_async_16_zero_fill(address + i / 2 * BOX_BYTES + ((i % 2 * 4 + thread % 4) ^ (row % 8)) * 16,
                                  source + i * 64, exists && (COLUMNS % BOX_COLUMNS == 0 || i * 32 < COLUMNS) ? 16 : 0);
    }
}

}  // namespace paged_mla_decode
