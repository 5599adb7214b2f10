// KV append: writes the keys and values of new tokens into a paged cache.
//
//   key   [tokens, kv_heads, key dim]   -+                                     +-> k_cache [page, slot, kv_heads, ...]
//   value [tokens, kv_heads, value dim] -+-> request, position -> page, slot  -+-> v_cache, likewise
//
// CTAs take chunks of neighbouring tokens in turn, so that all of them read and write one moving stretch of memory. All
// threads copy units, which are 16 bytes of a cache's row, in the order of the source, a batch at a time. Every warp
// finds the places of the chunk in the caches by itself, so that no warp waits for another, and only once it has begun
// to load the first batch: writing needs places, reading does not.
// A token without a place is read but not written. Nothing depends on where a token's neighbours go, so page tables may
// be in any order.
//
// QUANTISE: the source is 16-bit floats, the caches e4m3. Values are multiplied with 1 / scale, rounded in fp32, and
// saturate. Otherwise bytes are copied, whatever they are.
//
// Build: -DQUANTISE=0|1 -DSOURCE_FP16=0|1 (of a source that is quantised)
//        -DLOAD_FUNCTION=__ldcs|__ldcg (how new keys and values are read) -DKERNEL_NAME=symbol.

#include "../common/ptx.cuh"
#if QUANTISE
#include "AppendKvQuantiseParams.h"
using Params = AppendKvQuantiseParams;
#else
#include "AppendKvParams.h"
using Params = AppendKvParams;
#endif
#include "KernelConstants.h"

namespace append_kv {

constexpr int THREADS = APPEND_THREADS;
constexpr int CHUNK = APPEND_CHUNK_TOKENS;
constexpr int REQUESTS = APPEND_SHARED_REQUESTS;
constexpr int WARPS = THREADS / 32;
constexpr int LOADS = QUANTISE ? 2 : 1;  // of 16 bytes, for one unit
constexpr int UNITS_IN_FLIGHT = APPEND_LOADS / LOADS;  // of a thread
constexpr uint32_t BATCH_UNITS = THREADS * UNITS_IN_FLIGHT;
constexpr uint32_t UNIT_BYTES = 16;  // in a cache
static_assert(CHUNK <= 32, "a lane finds at most one place for each chunk");
static_assert(1LL * CHUNK * APPEND_MAX_UNITS * APPEND_MAX_UNITS < 1LL << 32, "divide() is exact for a chunk's units");

// Where a token goes, in bytes from the beginnings of the caches; k < 0: nowhere.
struct Place {
    int64_t k, v;
#if QUANTISE
    int request;  // whose scales it has
#endif
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

// What says where tokens belong: `begins` are the requests' first tokens and behind them the end of the last one; null:
// new_tokens each.
struct Requests {
    const int *begins, *lengths;
};

DEVICE Token find_token(const Params& p, const Requests& requests, int token) {
    const int* begins = requests.begins;
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
    const int length = requests.lengths[request];
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
#if QUANTISE
    int request;
#endif
};

DEVICE PageEntry find_page(const Params& p, const Requests& requests, int token) {
    const PageEntry nowhere = {0, 0, false};
    const Token found = find_token(p, requests, token);
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
    PageEntry result = {static_cast<const int*>(p.page_table)[entry],
                        position - column * static_cast<uint32_t>(p.page_size), true};
#if QUANTISE
    result.request = found.request;
#endif
    return result;
}

DEVICE Place place_of(const Params& p, const PageEntry& entry) {
    const Place nowhere = {-1, -1};
    if (!entry.is_inside) return nowhere;
    if (entry.page < 0 || entry.page >= p.num_pages) {
        report(p, STATUS_PAGE_OUTSIDE_POOL);
        return nowhere;
    }
    const int64_t slot = entry.slot;
    Place result = {entry.page * p.k_page_stride + slot * p.k_token_stride,
                    entry.page * p.v_page_stride + slot * p.v_token_stride};
#if QUANTISE
    result.request = entry.request;
#endif
    return result;
}

// n / d for n < 2^32 / d, with the reciprocal ceil(2^32 / d).
DEVICE uint32_t divide(uint32_t n, uint32_t reciprocal) {
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * reciprocal) >> 32);
}

// One unit: of which token of the chunk, whether of a key, of which head, and where in that head's row of the cache.
struct Unit {
    uint32_t in_chunk, head, offset;
    bool is_key;
};

// Selects, not branches, so that the loads of several units can be in flight together.
DEVICE Unit unit_of(const Params& p, uint32_t index) {
    const uint32_t in_chunk = divide(index, p.token_reciprocal);
    const uint32_t in_token = index - in_chunk * p.token_units;
    const uint32_t key_units = p.kv_heads * p.k_units;
    const bool is_key = in_token < key_units;
    const uint32_t in_rows = is_key ? in_token : in_token - key_units;
    const uint32_t head = divide(in_rows, is_key ? p.k_reciprocal : p.v_reciprocal);
    return {in_chunk, head, (in_rows - head * (is_key ? p.k_units : p.v_units)) * UNIT_BYTES, is_key};
}

DEVICE const char* source_of(const Params& p, const Unit& unit, int first) {
    const int64_t token = first + static_cast<int>(unit.in_chunk);
    const char* from = static_cast<const char*>(unit.is_key ? p.key : p.value);
    from += token * (unit.is_key ? p.key_token_stride : p.value_token_stride);
    return from + unit.head * (unit.is_key ? p.key_head_stride : p.value_head_stride) + unit.offset * LOADS;
}

// Null: the unit is not written.
DEVICE char* target_of(const Params& p, const Unit& unit, const Place* places) {
    const Place place = places[unit.in_chunk];
    char* to = static_cast<char*>(unit.is_key ? p.k_cache : p.v_cache);
    to += (unit.is_key ? place.k : place.v) + unit.head * (unit.is_key ? p.k_head_stride : p.v_head_stride);
    return place.k < 0 ? nullptr : to + unit.offset;
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

DEVICE float inverse_scale(float number, const void* device, int64_t element = 0) {
    return 1.f / (device ? number * static_cast<const float*>(device)[element] : number);
}

#if QUANTISE
// Of keys and of values: the inverses of their scales where all have one, else where each finds its own.
struct Scales {
    float inverse[2];
    bool has_one;

    DEVICE void load(const Params& p) {
        has_one =
            (p.k_scale_request_stride | p.k_scale_head_stride | p.v_scale_request_stride | p.v_scale_head_stride) == 0;
        inverse[0] = inverse_scale(p.k_scale, p.k_scale_device);
        inverse[1] = inverse_scale(p.v_scale, p.v_scale_device);
    }

    // Of a unit that is written.
    DEVICE float inverse_of(const Params& p, const Unit& unit, const Place* places) const {
        if (has_one) return unit.is_key ? inverse[0] : inverse[1];
        const int request = places[unit.in_chunk].request;
        return unit.is_key ? inverse_scale(p.k_scale, p.k_scale_device,
                                           request * p.k_scale_request_stride + unit.head * p.k_scale_head_stride)
                           : inverse_scale(p.v_scale, p.v_scale_device,
                                           request * p.v_scale_request_stride + unit.head * p.v_scale_head_stride);
    }
};
#else
struct Scales {
    float inverse[2] = {1.f, 1.f};
    DEVICE float inverse_of(const Params&, const Unit& unit, const Place*) const {
        return unit.is_key ? inverse[0] : inverse[1];
    }
};
#endif

struct Batch {
    uint4 data[UNITS_IN_FLIGHT][LOADS];
};

// Units past the chunk's last one are that one again.
DEVICE void load(const Params& p, int first, uint32_t units, uint32_t base, Batch& batch) {
#pragma unroll
    for (int i = 0; i < UNITS_IN_FLIGHT; ++i) {
        const char* from = source_of(p, unit_of(p, min(base + i * THREADS, units - 1)), first);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) batch.data[i][j] = LOAD_FUNCTION(reinterpret_cast<const uint4*>(from) + j);
    }
}

DEVICE void store(const Params& p, const Place* places, uint32_t units, uint32_t base, const Batch& batch,
                  const Scales& scales) {
#pragma unroll
    for (int i = 0; i < UNITS_IN_FLIGHT; ++i) {
        const uint32_t index = base + i * THREADS;
        const Unit unit = unit_of(p, min(index, units - 1));
        char* to = target_of(p, unit, places);
        if (to && index < units)
            *reinterpret_cast<uint4*>(to) = converted(batch.data[i], scales.inverse_of(p, unit, places));
    }
}

}  // namespace append_kv

extern "C" __global__ void __launch_bounds__(append_kv::THREADS, APPEND_CTAS_PER_MULTIPROCESSOR)
    KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace append_kv;
    __shared__ Place places[WARPS][CHUNK];
    __shared__ int begins_storage[REQUESTS + 1], lengths_storage[REQUESTS + 1];

    wait_for_previous_grid();
    allow_next_grid();  // its CTAs find room beside these, and wait for the end of this grid before they read
    Requests requests = {static_cast<const int*>(p.cum_seq_lens), static_cast<const int*>(p.seq_lens)};
    Scales scales;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool is_first = true;
    uint32_t begin = 0;  // of a batch of units, in its chunk
    for (int first = blockIdx.x * p.chunk_tokens; first < p.tokens;) {
        const int tokens = min(p.chunk_tokens, p.tokens - first);
        const uint32_t units = tokens * p.token_units, base = begin + threadIdx.x;
        const bool has_units = base - lane < units;  // this warp, in this batch
        Batch batch;
        if (has_units) load(p, first, units, base, batch);
        if (is_first) {  // while the first units are on their way
            is_first = false;
            if (requests.begins && p.batch <= REQUESTS) {
                for (int i = threadIdx.x; i <= p.batch; i += THREADS) {
                    const int begin_of = requests.begins[i], length = requests.lengths[min(i, p.batch - 1)];
                    begins_storage[i] = begin_of;
                    lengths_storage[i] = length;
                }
                requests = {begins_storage, lengths_storage};
                __syncthreads();  // all requests are there
            }
#if QUANTISE
            scales.load(p);
#endif
        }
        if (begin == 0) {
            const PageEntry entry = lane < tokens ? find_page(p, requests, first + lane) : PageEntry{0, 0, false};
            const Place place = place_of(p, entry);
            __syncwarp();  // no lane reads the last chunk's places
            if (lane < CHUNK) places[warp][lane] = place;
            __syncwarp();  // this chunk's places are there
        }
        if (has_units) store(p, places[warp], units, base, batch, scales);
        begin += BATCH_UNITS;
        if (begin >= units) {
            begin = 0;
            first += gridDim.x * p.chunk_tokens;
        }
    }
}
