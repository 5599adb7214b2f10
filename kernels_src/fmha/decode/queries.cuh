// Queries of any type as the consumers read them: converted to fp16 where the keys are.
#pragma once
#include "scheduler.cuh"

namespace paged_decode {

// Four e4m3 become two pairs of the products' type.
DEVICE void convert_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
    if constexpr (MMA_FP16)
        e4m3_to_fp16(four, low, high);
    else
        e4m3_to_bf16(four, low, high);
}

// The queries of a row of the work tile.
DEVICE const char* query_row(const Params& p, const WorkTile& work, int row) {
    const RowCoordinates at = coordinates_of(p, work.rows.first + row);
    const int64_t element =
        (work.rows.q_begin + at.token) * p.q_token_stride + (work.rows.head * p.group + at.head) * p.q_head_stride;
    return static_cast<const char*>(p.q) + element * (p.q_type == TYPE_E4M3 ? 1 : 2);
}

// Two neighbouring head dims.
DEVICE float2 query_values(const Params& p, const void* row, int element) {
    if (p.q_type == TYPE_BF16)
        return unpack_bf16(*reinterpret_cast<const uint32_t*>(static_cast<const char*>(row) + element * 2));
    if (p.q_type == TYPE_FP16)
        return unpack_fp16(*reinterpret_cast<const uint32_t*>(static_cast<const char*>(row) + element * 2));
    return unpack_e4m3(*reinterpret_cast<const uint16_t*>(static_cast<const char*>(row) + element));
}

// The exponent of the largest magnitude among the four lanes of a row. Divided by two to that power, a bf16 row fits
// fp16. 0 if every lane passes 0, as for queries that fit already.
DEVICE int common_exponent(float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if (largest == 0.f) return 0;
    return fp16_range_exponent(__float_as_uint(largest) >> 23);
}

}  // namespace paged_decode
