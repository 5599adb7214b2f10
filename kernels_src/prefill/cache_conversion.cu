// Conversion of an e4m3 cache for context attention: the keys and values of all requests become 16-bit floats, exactly,
// in scratch memory, where each request has one page.
//
//   pages, requests or ragged tokens of e4m3 --> [request, KV head, token, column]; ragged: [KV head, token, column]
//
// A CTA converts CTA_TOKENS tokens of a request and KV head, keys or values. Its threads take 8 columns each,
// neighbours those of a row and then of the next, so that reads are whole rows and writes follow each other. Tokens
// past a request's length are left as they are: attention masks their keys and clears their values.
//
// Build: -DTO_FP16=0|1 (else bf16) -DCTA_TOKENS=n, a multiple of 32
//        -DUNITS_IN_FLIGHT=n loads of a thread, which divides CTA_TOKENS / 32
//        -DLOAD_FUNCTION=__ldcs|__ldcg (how the cache is read) -DKERNEL_NAME=symbol
#include "../common/ptx.cuh"
#include "CacheConversionParams.h"
#include "KernelConstants.h"

namespace cache_conversion {

using Params = CacheConversionParams;

constexpr int THREADS = 256;
constexpr int UNIT = 8;  // columns of a thread at a time

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

// Nobody reads the keys of a request without query tokens, whose page ids may be anything.
DEVICE bool has_queries(const Params& p) {
    const int* sums = static_cast<const int*>(p.q_cu_seq_lens);
    return sums == nullptr || sums[blockIdx.z + 1] > sums[blockIdx.z];
}

template <int COLUMNS>
DEVICE void convert(const Params& p, const Tensor& t, bool is_key, int first, int length) {
    constexpr int ROW_UNITS = COLUMNS / UNIT, UNITS = CTA_TOKENS * ROW_UNITS / THREADS;  // of a thread
    static_assert(UNITS % UNITS_IN_FLIGHT == 0, "all of them are taken");
    const int units = (length - first) * ROW_UNITS;
    const int* ids = p.page_table == nullptr ? nullptr
                                             : static_cast<const int*>(p.page_table) + blockIdx.z * p.table_stride +
                                                   (is_key ? 0 : p.v_table_offset);
    bool is_outside = false;
    uint16_t* to = t.to + static_cast<int64_t>(first) * COLUMNS;
#pragma unroll 1
    for (int base = threadIdx.x; base < UNITS * THREADS; base += UNITS_IN_FLIGHT * THREADS) {
        int page[UNITS_IN_FLIGHT];
        uint2 raw[UNITS_IN_FLIGHT];
        const auto unit_of = [&](int i) { return min(base + i * THREADS, units - 1); };  // the last one again
#pragma unroll
        for (int i = 0; i < UNITS_IN_FLIGHT; ++i)
            page[i] = ids == nullptr ? blockIdx.z : ids[(first + unit_of(i) / ROW_UNITS) >> p.page_size_log2];
#pragma unroll
        for (int i = 0; i < UNITS_IN_FLIGHT; ++i) {
            // Clamped, as attention over pages does.
            const int inside = ids == nullptr ? page[i] : min(max(page[i], 0), p.num_pages - 1);
            is_outside |= inside != page[i];
            const int slot = (first + unit_of(i) / ROW_UNITS) & ((1 << p.page_size_log2) - 1);
            const uint8_t* row = t.from + inside * t.page_stride + slot * t.token_stride;
            raw[i] = LOAD_FUNCTION(reinterpret_cast<const uint2*>(row + unit_of(i) % ROW_UNITS * UNIT));
        }
#pragma unroll
        for (int i = 0; i < UNITS_IN_FLIGHT; ++i) {
            constexpr auto pairs = TO_FP16 ? e4m3_to_fp16 : e4m3_to_bf16;
            uint4 converted;
            pairs(raw[i].x, converted.x, converted.y);
            pairs(raw[i].y, converted.z, converted.w);
            const int unit = base + i * THREADS;
            if (unit < units) __stcg(reinterpret_cast<uint4*>(to + unit * UNIT), converted);
        }
    }
    if (is_outside) atomicOr(static_cast<uint32_t*>(p.status), STATUS_PAGE_OUTSIDE_POOL);
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
    if (first >= length || !has_queries(p)) return;
    const Tensor t = tensor_of(p, is_key, head);
    switch (t.columns) {
        case 64:
            return convert<64>(p, t, is_key, first, length);
        case 128:
            return convert<128>(p, t, is_key, first, length);
        case 192:
            return convert<192>(p, t, is_key, first, length);
        case 256:
            return convert<256>(p, t, is_key, first, length);
    }
}
