// Conversion of an e4m3 cache for context attention: the keys and values of all requests become 16-bit floats, exactly,
// in scratch memory, where each request has one page.
//
//   pages, requests or ragged tokens of e4m3 --> [request, KV head, token, column]; ragged: [KV head, token, column]
//
// A CTA converts CTA_TOKENS tokens of a request and KV head, keys or values; eight lanes a row, each 8 columns at
// a time, so that a warp reads and writes whole sectors. Tokens past a request's length are left as they are: attention
// masks their keys and clears their values.
//
// Build: -DTO_FP16=0|1 (else bf16) -DCTA_TOKENS=n, a multiple of 32, -DKERNEL_NAME=symbol
#include "../common/ptx.cuh"
#include "CacheConversionParams.h"
#include "KernelConstants.h"

namespace cache_conversion {

using Params = CacheConversionParams;

constexpr int THREADS = 256;
constexpr int ROW_LANES = 8;
constexpr int COLUMNS = 8 * ROW_LANES;  // of a row at a time
constexpr int ROWS = THREADS / ROW_LANES;  // at a time
constexpr int ROUNDS = CTA_TOKENS / ROWS;

// Keys or values of one KV head; strides in bytes.
struct Tensor {
    const uint8_t* from;
    uint16_t* to;
    int64_t page_stride, token_stride;
    int columns;
};

DEVICE Tensor tensor_of(const Params& p, bool is_key, int head) {
    Tensor t;
    t.columns = is_key ? p.k_columns : p.v_columns;
    t.page_stride = is_key ? p.k_page_stride : p.v_page_stride;
    t.token_stride = is_key ? p.k_token_stride : p.v_token_stride;
    t.from = static_cast<const uint8_t*>(is_key ? p.k : p.v) + head * (is_key ? p.k_head_stride : p.v_head_stride);
    t.to = static_cast<uint16_t*>(is_key ? p.converted_k : p.converted_v) +
           (static_cast<int64_t>(blockIdx.z) * p.kv_heads + head) * p.tokens * t.columns;
    return t;
}

// Ids out of bounds are clamped, as attention over pages does.
DEVICE int page_of(const Params& p, bool is_key, int token) {
    if (p.page_table == nullptr) return blockIdx.z;
    const int* ids = static_cast<const int*>(p.page_table) + blockIdx.z * p.table_stride;
    const int page = ids[(is_key ? 0 : p.v_table_offset) + (token >> p.page_size_log2)];
    if (page >= 0 && page < p.num_pages) return page;
    atomicOr(static_cast<uint32_t*>(p.status), STATUS_PAGE_OUTSIDE_POOL);
    return min(max(page, 0), p.num_pages - 1);
}

}  // namespace cache_conversion

extern "C" __global__ void __launch_bounds__(cache_conversion::THREADS)
    KERNEL_NAME(const __grid_constant__ cache_conversion::Params p) {
    using namespace cache_conversion;
    wait_for_previous_grid();
    allow_next_grid();
    const int head = blockIdx.x >> 1, first = blockIdx.y * CTA_TOKENS;
    const bool is_key = blockIdx.x % 2 == 0;
    int length = min(p.max_seq_len, p.tokens);
    if (p.seq_lens != nullptr) length = min(length, static_cast<const int*>(p.seq_lens)[blockIdx.z]);
    if (first >= length) return;
    const Tensor t = tensor_of(p, is_key, head);
    const int row = threadIdx.x / ROW_LANES, lane = threadIdx.x % ROW_LANES;
    const uint8_t* from[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int token = min(first + i * ROWS + row, length - 1);
        const int slot = token & ((1 << p.page_size_log2) - 1);
        from[i] = t.from + page_of(p, is_key, token) * t.page_stride + slot * t.token_stride + lane * 8;
    }
    uint16_t* to = t.to + static_cast<int64_t>(first + row) * t.columns + lane * 8;
#pragma unroll 1
    for (int column = 0; column < t.columns; column += COLUMNS) {
        uint2 raw[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) raw[i] = __ldcs(reinterpret_cast<const uint2*>(from[i] + column));
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            constexpr auto pairs = TO_FP16 ? e4m3_to_fp16 : e4m3_to_bf16;
            uint4 converted;
            pairs(raw[i].x, converted.x, converted.y);
            pairs(raw[i].y, converted.z, converted.w);
            if (first + i * ROWS + row < length)
                *reinterpret_cast<uint4*>(to + static_cast<int64_t>(i) * ROWS * t.columns + column) = converted;
        }
    }
}
