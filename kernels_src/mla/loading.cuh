// What brings data into shared memory: one warp for tiles of the cache, three for the queries.
#pragma once
#include "work.cuh"

namespace paged_mla_decode {

// As one instruction: atomicOr would gather the warp's first, in registers that the producer does not have.
DEVICE void report_outside_page(const Params& p) {
    asm volatile("red.global.or.b32 [%0], %1;" ::"l"(p.status), "n"(STATUS_PAGE_OUTSIDE_POOL) : "memory");
}

// Page ids of one request, 32 at a time in the lanes of a warp.
struct PageWindow {
    int base = -1;  // first table column held
    int page = 0;
    // Makes the columns from `first` to `last`, fewer than 32, ready for `at`.
    DEVICE void hold(const Params& p, const Piece& piece, int first, int last) {
        if (base >= 0 && last < base + 32) return;
        base = first;
        const int column = first + threadIdx.x % 32;
        const int columns = ((piece.length - 1) >> p.page_size_log2) + 1;
        page = column < columns ? static_cast<const int*>(p.page_table)[static_cast<uint32_t>(piece.request) * p.table_stride + column] : 0;
        const int inside = min(max(page, 0), p.num_pages - 1);
        if (inside != page) report_outside_page(p);
        page = inside;
    }
    DEVICE int at(int column) const { return __shfl_sync(~0u, page, column - base); }
};

#if KV_E4M3
constexpr int ROW_LOG2 = 6;  // bytes of a token in a box

// The raw boxes lie where the first half of the converted ones will be, the rope's apart.
DEVICE uint32_t raw_box(Shared& shared, int b, int box) {
    return box == ROPE_BOX ? shared_address(shared.raw_rope[b]) : shared_address(shared.kv[b]) + box * (BOX_BYTES / 2);
}

DEVICE uint32_t box_target(Shared& shared, int b, int box) { return raw_box(shared, b, box); }
#else
constexpr int ROW_LOG2 = 7;

DEVICE uint32_t box_target(Shared& shared, int b, int box) { return shared_address(shared.kv[b][box]); }
#endif

// One thread issues the copies. A buffer becomes free in two halves: the columns of the first consumer warpgroup, and the
// others. In a cluster each CTA brings its part of the boxes to all. The rope columns, which hold P once the scores are
// known, come last, when both warpgroups are through with the buffer.
DEVICE void produce(const Params& p, const Share& share, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int page_tokens = 1 << p.page_size_log2;
    const int chunk_log2 = min(p.page_size_log2, TILE_TOKENS_LOG2);  // tokens of a tile that one page holds together
    uint32_t phase = 0;                               // bit b: of the next wait for buffer b to be empty
    const uint64_t policy = p.tiles_together == 1 ? evict_first_policy() : evict_normal_policy();
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        PageWindow pages;
        const int last = piece.first + piece.steps();
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            const int far = min(tile + PREFETCH_TILES, last - 1);
            pages.hold(p, piece, tile * TILE_TOKENS >> p.page_size_log2,
                       min(far * TILE_TOKENS + TILE_TOKENS, piece.length) - 1 >> p.page_size_log2);
            const int chunks = ((piece.valid(tile) - 1) >> chunk_log2) + 1;
            const int b = (tile - piece.first) % BUFFERS;
            int page[TILE_TOKENS / 32];
#pragma unroll
            for (int i = 0; i < TILE_TOKENS / 32; ++i)
                page[i] = i < chunks ? pages.at((tile * TILE_TOKENS + (i << chunk_log2)) >> p.page_size_log2) : 0;
            const int row = tile * TILE_TOKENS & (page_tokens - 1);
#pragma unroll
            for (int half = 0; half < (KV_E4M3 ? 1 : 2); ++half) {
                if (CLUSTER == 1)
                    wait_barrier(shared.empty[b][half], (phase >> b & 1) ^ 1);
                else
                    wait_cluster_barrier(shared.empty[b][half], (phase >> b & 1) ^ 1);
                if (lane != 0) continue;
#if KV_E4M3
                mbarrier_arrive_expect_bytes(shared_address(&shared.raw[b]), BOXES * chunks << (chunk_log2 + ROW_LOG2));
#endif
#pragma unroll
                for (int box = half * HALF_BOXES; box < (half == 1 || KV_E4M3 ? BOXES : HALF_BOXES); ++box) {
#if KV_E4M3
                    const uint32_t full = shared_address(&shared.raw[b]);
#else
                    const uint32_t full = shared_address(&shared.full[b][box]);
                    mbarrier_arrive_expect_bytes(full, chunks << (chunk_log2 + ROW_LOG2));
#endif
                    const uint32_t target = box_target(shared, b, box);
#pragma unroll
                    for (int i = 0; i < TILE_TOKENS / 32; ++i) {
                        if (i >= chunks) break;
#if CLUSTER == 1
                        copy_tensor_box_3d(target + (i << (chunk_log2 + ROW_LOG2)), &p.kv_map, full, box * BOX_COLUMNS, row,
                                           page[i], policy);
#else
                        if (box % CLUSTER == share.member % CLUSTER)
                            copy_tensor_box_3d_to_cluster(target + (i << (chunk_log2 + ROW_LOG2)), &p.kv_map, full,
                                                          box * BOX_COLUMNS, row, page[i], (1 << CLUSTER) - 1, policy);
#endif
                    }
                }
            }
            __syncwarp();
            phase ^= 1u << b;
            if (far < tile + PREFETCH_TILES || PREFETCH_TILES == 0) continue;
#pragma unroll 1
            for (int i = 0; i <= (piece.valid(far) - 1) >> chunk_log2; ++i) {
                const int token = far * TILE_TOKENS + (i << chunk_log2);
                const int far_page = pages.at(token >> p.page_size_log2);
                if (lane == 0)
#pragma unroll 1
                    for (int box = CLUSTER == 1 ? 0 : share.member % CLUSTER; box < BOXES; box += CLUSTER)
                        prefetch_tensor_box_3d(&p.kv_map, box * BOX_COLUMNS, token & (page_tokens - 1), far_page);
                __syncwarp();
            }
        }
    }
}

#if KV_E4M3
constexpr int CONVERTER_BARRIER = 7;

DEVICE uint4 load_shared_16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

DEVICE void store_shared_16(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Four e4m3 become four fp16.
DEVICE uint2 fp16_of_e4m3(uint32_t four) {
    uint2 v;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(v.x), "=r"(v.y)
        : "r"(four));
    return v;
}

DEVICE uint32_t fp16_of_bf16(uint32_t two, float factor) {
    const float2 wide = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
    return pack_fp16(wide.x * factor, wide.y * factor);
}

// The boxes of a tile from e4m3 to fp16, from the last to the first: box i is written over the raw boxes 2 i and 2 i + 1,
// which by then all threads have read.
DEVICE void convert_tile(Shared& shared, int b, uint32_t parity) {
    constexpr int CHUNKS_OF_BOX = BOX_BYTES / 32;  // 16 raw bytes each
    constexpr int ROUNDS = (CHUNKS_OF_BOX + LOADERS - 1) / LOADERS;
    const int thread = threadIdx.x - CONSUMERS - 32;
    // A thread's chunks are LOADERS apart, a multiple of 32: their rows differ by multiples of 8, their swizzle does not.
    static_assert(LOADERS % 32 == 0);
    const uint32_t place = thread / 4 * 128 + ((thread % 4 * 2) ^ (thread / 4 % 8)) * 16;
    wait_barrier(shared.raw[b], parity);
    wait_barrier(shared.empty[b][1], parity ^ 1);
#pragma unroll 1
    for (int box = BOXES - 1; box >= 0; --box) {
        const uint32_t raw = raw_box(shared, b, box) + thread * 16;
        const uint32_t first = shared_address(shared.kv[b][box]) + place, second = first ^ 16;
        const auto exists = [&](int i) { return (i + 1) * LOADERS <= CHUNKS_OF_BOX || thread < CHUNKS_OF_BOX - i * LOADERS; };
        uint4 own[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            if (exists(i)) own[i] = load_shared_16(raw + i * LOADERS * 16);
        if (box < HALF_BOXES) named_barrier_sync<LOADERS>(CONVERTER_BARRIER);  // written over raw boxes
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (!exists(i)) break;
            const uint2 a = fp16_of_e4m3(own[i].x), c = fp16_of_e4m3(own[i].y);
            store_shared_16(first + i * LOADERS * 32, make_uint4(a.x, a.y, c.x, c.y));
            const uint2 e = fp16_of_e4m3(own[i].z), g = fp16_of_e4m3(own[i].w);
            store_shared_16(second + i * LOADERS * 32, make_uint4(e.x, e.y, g.x, g.y));
        }
        if (box % 3) continue;
        fence_async_proxy();
        __syncwarp();
        const int done = box + threadIdx.x % 32;
        if (threadIdx.x % 32 < 3 && done < BOXES) mbarrier_arrive(shared_address(&shared.full[b][done]));
    }
}
#endif

constexpr int CHUNKS = BOXES * 8;  // of 8 columns in a row, 16 bytes each as the products read them

DEVICE uint32_t query_place(Shared& shared, int row, int column) {
    return shared_address(shared.q[0]) + column / 8 * BOX_BYTES + row * 128 + ((column % 8) ^ (row % 8)) * 16;
}

#if KV_E4M3
DEVICE void copy_8_bytes_or_zeros(uint32_t destination, const void* source, int size) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(size) : "memory");
}

DEVICE float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23); }

// A row of bf16 becomes fp16, divided by the power of two that brings its largest magnitude below 2, which the scores of the
// row are multiplied by; e4m3, 8 bytes in front of each 16, becomes fp16 as it is. Each lane converts what it copied.
DEVICE void convert_query(Shared& shared, int row, bool e4m3) {
    constexpr int ROUNDS = (CHUNKS + 31) / 32;
    const int lane = threadIdx.x % 32;
    uint4 own[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int column = lane + i * 32;
        own[i] = column < CHUNKS ? load_shared_16(query_place(shared, row, column)) : make_uint4(0, 0, 0, 0);
    }
    int exponent = 0;
    if (!e4m3) {
        uint32_t largest = 0;  // magnitudes in both halves: those of bf16 are ordered as integers are
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            largest = __vmaxu2(largest, __vmaxu2(own[i].x & 0x7fff7fff, own[i].y & 0x7fff7fff));
            largest = __vmaxu2(largest, __vmaxu2(own[i].z & 0x7fff7fff, own[i].w & 0x7fff7fff));
        }
        largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
        // At 112 the largest bf16 is just within fp16, and the power is no danger to the softmax scale.
        if (largest > 0) exponent = min(max(static_cast<int>(largest >> 7) - 127, -100), 112);
    }
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int column = lane + i * 32;
        if (column >= CHUNKS) break;
        const uint4 v = own[i];
        const uint2 a = e4m3 ? fp16_of_e4m3(v.x) : make_uint2(fp16_of_bf16(v.x, factor), fp16_of_bf16(v.y, factor));
        const uint2 c = e4m3 ? fp16_of_e4m3(v.y) : make_uint2(fp16_of_bf16(v.z, factor), fp16_of_bf16(v.w, factor));
        store_shared_16(query_place(shared, row, column), make_uint4(a.x, a.y, c.x, c.y));
    }
    if (lane == 0) shared.q_power[row] = power_of_two(exponent);
}
#endif

// Row R of a request is head R % heads of its query token R / heads; rows past the last are zero.
DEVICE void load_queries(const Params& p, const Share& share, Shared& shared) {
    constexpr int UNROLL = KV_E4M3 ? 1 : 3;  // converters have no registers to spare
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - CONSUMERS / 32 - 1;
    uint32_t phase = 0;  // bit b: of raw buffer b; bit BUFFERS: of the queries
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        wait_barrier(shared.q_empty, (phase >> BUFFERS & 1) ^ 1);
        const bool e4m3 = KV_E4M3 && p.q_type == TYPE_E4M3;
        const int element = e4m3 ? 1 : 2;  // bytes
        const char* q = static_cast<const char*>(p.q) + piece.first_query * p.q_token_stride * element;
        // A warp takes every third row; dividing once, it walks on from there.
        int token = (piece.row_tile * ROWS + warp) / p.heads;
        int head = (piece.row_tile * ROWS + warp) - token * p.heads;
#pragma unroll 1
        for (int row = warp; row < ROWS; row += LOADERS / 32) {
            const bool exists = row < piece.rows;
            const char* source = exists ? q + (token * p.q_token_stride + head * p.q_head_stride) * element : q;
#pragma unroll UNROLL
            for (int i = 0; i < (CHUNKS + 31) / 32; ++i) {
                const int column = lane + i * 32;
                if (column >= CHUNKS) continue;
#if KV_E4M3
                if (e4m3) {
                    copy_8_bytes_or_zeros(query_place(shared, row, column), source + column * 8, exists ? 8 : 0);
                    continue;
                }
#endif
                copy_16_bytes_or_zeros(query_place(shared, row, column), source + column * 16, exists ? 16 : 0);
            }
            head += LOADERS / 32;
            while (head >= p.heads) head -= p.heads, ++token;
        }
        wait_for_copies();
#if KV_E4M3
#pragma unroll 1
        for (int row = warp; row < ROWS; row += LOADERS / 32) convert_query(shared, row, e4m3);
#endif
        fence_async_proxy();
        mbarrier_arrive(shared_address(&shared.q_full));
        phase ^= 1u << BUFFERS;
#if KV_E4M3
#pragma unroll 1
        for (int left = piece.steps(), b = 0; left > 0; --left, b ^= 1) {
            convert_tile(shared, b, phase >> b & 1);
            phase ^= 1u << b;
        }
#endif
    }
}

}  // namespace paged_mla_decode
