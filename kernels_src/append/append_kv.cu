// KV append: writes the keys and values of new tokens into a paged cache.
//
//   key   [tokens, kv_heads, key dim]   -+                                     +-> k_cache [page, slot, kv_heads, ...]
//   value [tokens, kv_heads, value dim] -+-> request, position -> page, slot  -+-> v_cache, likewise
//
// CTAs take chunks of neighbouring tokens in turn, so that all of them read and write one moving stretch of memory. Every
// warp finds the places of the chunk in the caches by itself, so that no warp waits for another, and looks up the next
// chunk's pages while it copies. All threads copy units, which are 16 bytes of a cache's row, in the order of the source.
// A token without a place is read but not written. Nothing depends on where a token's neighbours go, so page tables may
// be in any order.
//
// QUANTISE: the source is 16-bit floats, the caches e4m3. Values are multiplied with 1 / scale, rounded in fp32, and
// saturate. Otherwise bytes are copied, whatever they are.
//
// Build: -DQUANTISE=0|1 -DSOURCE_FP16=0|1 (of a source that is quantised) -DKERNEL_NAME=symbol.

#include "../common/ptx.cuh"
#include "AppendKvParams.h"
#include "KernelConstants.h"

using Params = AppendKvParams;

namespace append_kv {

constexpr int THREADS = APPEND_THREADS;
constexpr int CHUNK = APPEND_CHUNK_TOKENS;
constexpr int BEGINS = APPEND_SHARED_REQUESTS;
constexpr int WARPS = THREADS / 32;
constexpr int LOADS = QUANTISE ? 2 : 1;  // of 16 bytes, for one unit
constexpr int UNITS_IN_FLIGHT = 4 / LOADS;  // of a thread
constexpr uint32_t UNIT_BYTES = 16;  // in a cache
static_assert(CHUNK <= 32, "a lane finds at most one place for each chunk");
static_assert(1LL * CHUNK * APPEND_MAX_UNITS * APPEND_MAX_UNITS < 1LL << 32, "divide() is exact for a chunk's units");

// Where a token goes, in bytes from the beginnings of the caches; k < 0: nowhere.
struct Place {
    int64_t k, v;
};

struct Token {
    int request;  // < 0: it is not written
    int64_t position;  // in the request's keys
};

DEVICE void report(const Params& p, uint32_t bit) { atomicOr(static_cast<uint32_t*>(p.status), bit); }

// The last request that begins at or before `token`: among requests without tokens that begin there too, the one that
// may have it.
DEVICE int request_of(const int* begins, int batch, int token) {
    int low = 0, high = batch;
    while (high - low > 1) {
        const int middle = (low + high) >> 1;
        if (begins[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// `begins` are the requests' first tokens and behind them the end of the last one; null: new_tokens each.
DEVICE Token find_token(const Params& p, const int* begins, int token) {
    if (p.positions) {
        const int request = static_cast<const int*>(p.batch_indices)[token];
        if (request < p.batch) return {request, static_cast<const int*>(p.positions)[token]};
        report(p, STATUS_TOKEN_OF_NO_REQUEST);
        return {-1, 0};
    }
    int request, begin, end;
    if (begins) {
        if (token >= begins[p.batch]) return {-1, 0};
        request = request_of(begins, p.batch, token);
        begin = begins[request];
        end = begins[request + 1];
        if (begin < 0 || token < begin || token >= end || end > begins[p.batch]) {
            report(p, STATUS_TOKEN_OF_NO_REQUEST);
            return {-1, 0};
        }
    } else {
        request = token / p.new_tokens;
        begin = request * p.new_tokens;
        end = begin + p.new_tokens;
    }
    const int length = static_cast<const int*>(p.seq_lens)[request];
    if (length < 0) {
        report(p, STATUS_LENGTH_NEGATIVE);
        return {-1, 0};
    }
    return {request, static_cast<int64_t>(length) + (token - (p.lengths_include_new ? end : begin))};
}

// A token's page, as the table has it, and its slot there; `is_inside` false: it has no page.
struct PageEntry {
    int page;
    uint32_t slot;
    bool is_inside;
};

DEVICE PageEntry find_page(const Params& p, const int* begins, int token) {
    const PageEntry nowhere = {0, 0, false};
    const Token found = find_token(p, begins, token);
    if (found.request < 0 || found.position < 0) return nowhere;
    // A length and an index below 2^31 each.
    const uint32_t position = static_cast<uint32_t>(found.position);
    const uint32_t column = position / static_cast<uint32_t>(p.page_size);
    int64_t entry = found.request * p.table_stride + column;
    bool is_inside = column < static_cast<uint32_t>(p.columns);
    if (p.page_indptr) {
        const int* bounds = static_cast<const int*>(p.page_indptr) + found.request;
        const int first = bounds[0], last = min(bounds[1], p.columns);
        entry = static_cast<int64_t>(first) + column;
        is_inside = first >= 0 && entry < last;
    }
    if (!is_inside) {
        report(p, STATUS_POSITION_WITHOUT_PAGE);
        return nowhere;
    }
    return {static_cast<const int*>(p.page_table)[entry], position - column * static_cast<uint32_t>(p.page_size), true};
}

DEVICE Place place_of(const Params& p, const PageEntry& entry) {
    const Place nowhere = {-1, -1};
    if (!entry.is_inside) return nowhere;
    if (entry.page < 0 || entry.page >= p.num_pages) {
        report(p, STATUS_PAGE_OUTSIDE_POOL);
        return nowhere;
    }
    const int64_t slot = entry.slot;
    return {entry.page * p.k_page_stride + slot * p.k_token_stride,
            entry.page * p.v_page_stride + slot * p.v_token_stride};
}

// n / d for n < 2^32 / d, with the reciprocal ceil(2^32 / d).
DEVICE uint32_t divide(uint32_t n, uint32_t reciprocal) {
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * reciprocal) >> 32);
}

// One unit: where it is read, where it is written (null: nowhere), and whether it is of a key.
struct Unit {
    const char* from;
    char* to;
    bool is_key;
};

// Selects, not branches, so that the loads of several units can be in flight together.
DEVICE Unit unit_of(const Params& p, const Place* places, int first, uint32_t index) {
    const uint32_t in_chunk = divide(index, p.token_reciprocal);
    const uint32_t in_token = index - in_chunk * p.token_units;
    const uint32_t key_units = p.kv_heads * p.k_units;
    const bool is_key = in_token < key_units;
    const uint32_t in_rows = is_key ? in_token : in_token - key_units;
    const uint32_t head = divide(in_rows, is_key ? p.k_reciprocal : p.v_reciprocal);
    const uint32_t offset = (in_rows - head * (is_key ? p.k_units : p.v_units)) * UNIT_BYTES;
    const int64_t token = first + static_cast<int>(in_chunk);
    const Place place = places[in_chunk];
    const char* from = static_cast<const char*>(is_key ? p.key : p.value);
    char* to = static_cast<char*>(is_key ? p.k_cache : p.v_cache);
    from += token * (is_key ? p.key_token_stride : p.value_token_stride);
    from += head * (is_key ? p.key_head_stride : p.value_head_stride) + offset * LOADS;
    to += (is_key ? place.k : place.v) + head * (is_key ? p.k_head_stride : p.v_head_stride) + offset;
    return {from, place.k < 0 ? nullptr : to, is_key};
}

#if QUANTISE
DEVICE uint32_t quantise_four(uint32_t low, uint32_t high, float inverse) {
#if SOURCE_FP16
    const float2 a = unpack_fp16(low), b = unpack_fp16(high);
#else
    const float2 a = unpack_bf16(low), b = unpack_bf16(high);
#endif
    const uint32_t second = pack_e4m3(b.x * inverse, b.y * inverse);
    return pack_e4m3(a.x * inverse, a.y * inverse) | second << 16;
}
#endif

DEVICE uint4 converted(const uint4 (&data)[LOADS], float inverse) {
#if QUANTISE
    return {quantise_four(data[0].x, data[0].y, inverse), quantise_four(data[0].z, data[0].w, inverse),
            quantise_four(data[1].x, data[1].y, inverse), quantise_four(data[1].z, data[1].w, inverse)};
#else
    return data[0];
#endif
}

// `inverses` are those of the scales of keys and of values.
DEVICE void copy(const Params& p, const Place* places, int first, uint32_t units,
                 const float (&inverses)[2]) {
    for (uint32_t base = threadIdx.x; base < units; base += THREADS * UNITS_IN_FLIGHT) {
        uint4 data[UNITS_IN_FLIGHT][LOADS];
        Unit unit[UNITS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < UNITS_IN_FLIGHT; ++i) {  // all loads of a batch are in flight together
            const uint32_t index = base + i * THREADS;
            unit[i] = unit_of(p, places, first, min(index, units - 1));
            if (index >= units) unit[i].to = nullptr;
#pragma unroll
            for (int j = 0; j < LOADS; ++j) data[i][j] = __ldcs(reinterpret_cast<const uint4*>(unit[i].from) + j);
        }
#pragma unroll
        for (int i = 0; i < UNITS_IN_FLIGHT; ++i)
            if (unit[i].to)
                *reinterpret_cast<uint4*>(unit[i].to) = converted(data[i], unit[i].is_key ? inverses[0] : inverses[1]);
    }
}

DEVICE float inverse_scale(float number, const void* device) {
    return 1.f / (device ? number * *static_cast<const float*>(device) : number);
}

}  // namespace append_kv

extern "C" __global__ void __launch_bounds__(append_kv::THREADS, APPEND_CTAS_PER_MULTIPROCESSOR)
    KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace append_kv;
    __shared__ Place places[WARPS][CHUNK];
    __shared__ int begins_storage[BEGINS + 1];

    wait_for_previous_grid();
    allow_next_grid();  // its CTAs find room beside these, and wait for the end of this grid before they read
    const int* begins = static_cast<const int*>(p.cum_seq_lens);
    if (begins && p.batch <= BEGINS) {
        for (int i = threadIdx.x; i <= p.batch; i += THREADS) begins_storage[i] = begins[i];
        begins = begins_storage;
        __syncthreads();  // all beginnings are there
    }
    const float inverses[2] = {QUANTISE ? inverse_scale(p.k_scale, p.k_scale_device) : 1.f,
                               QUANTISE ? inverse_scale(p.v_scale, p.v_scale_device) : 1.f};
    // As many chunks for every CTA; the first `rest` have a token more.
    const int ctas = gridDim.x, chunks = (p.tokens + ctas * CHUNK - 1) / (ctas * CHUNK) * ctas;
    const int share = p.tokens / chunks, rest = p.tokens % chunks;
    const auto first_of = [&](int chunk) { return chunk * share + min(chunk, rest); };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto page_in = [&](int chunk) {
        const int token = first_of(chunk) + lane;
        return token < first_of(chunk + 1) ? find_page(p, begins, token) : PageEntry{0, 0, false};
    };
    PageEntry entry = page_in(blockIdx.x);
    for (int chunk = blockIdx.x; chunk < chunks; chunk += ctas) {
        __syncwarp();  // no lane reads the last chunk's places
        if (lane < CHUNK) places[warp][lane] = place_of(p, entry);
        __syncwarp();  // this chunk's places are there
        if (chunk + ctas < chunks) entry = page_in(chunk + ctas);  // in flight during the copies
        const int first = first_of(chunk);
        copy(p, places[warp], first, (first_of(chunk + 1) - first) * p.token_units, inverses);
    }
}
