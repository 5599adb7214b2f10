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
// others. In a cluster each CTA brings its part of the boxes to all. The rope columns, which hold P once the scores are known, go with the half of the warpgroup that reads that P.
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
                    wait_barrier(shared.empty[b][half], (phase >> b & 1) ^ 1, 10 + 2 * b + half);
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

DEVICE uint32_t fp16_of_bf16(uint32_t two) {
    const float2 wide = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
    return pack_fp16(wide.x, wide.y);
}

// The boxes of a tile from e4m3 to fp16, from the last to the first: box i is written over the raw boxes 2 i and 2 i + 1,
// which by then all threads have read.
DEVICE void convert_tile(Shared& shared, int b, uint32_t parity) {
    constexpr int ROUNDS = (BOX_BYTES / 32 + LOADERS - 1) / LOADERS;
    const int thread = threadIdx.x - CONSUMERS - 32;
    wait_barrier(shared.raw[b], parity, 40);
    wait_barrier(shared.empty[b][1], parity ^ 1, 41);
#pragma unroll 1
    for (int box = BOXES - 1; box >= 0; --box) {
        const uint32_t raw = raw_box(shared, b, box), target = shared_address(shared.kv[b][box]);
        uint4 own[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            own[i] = load_shared_16(raw + min(thread + i * LOADERS, BOX_BYTES / 32 - 1) * 16);
        if (box < HALF_BOXES) named_barrier_sync<LOADERS>(CONVERTER_BARRIER);  // written over raw boxes
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int chunk = thread + i * LOADERS;
            if (chunk >= BOX_BYTES / 32) break;
            const int row = chunk / 4, column = chunk % 4 * 2;
            const uint2 a = fp16_of_e4m3(own[i].x), c = fp16_of_e4m3(own[i].y);
            store_shared_16(target + row * 128 + (column ^ (row % 8)) * 16, make_uint4(a.x, a.y, c.x, c.y));
            const uint2 e = fp16_of_e4m3(own[i].z), g = fp16_of_e4m3(own[i].w);
            store_shared_16(target + row * 128 + ((column + 1) ^ (row % 8)) * 16, make_uint4(e.x, e.y, g.x, g.y));
        }
        if (box % 3) continue;
        fence_async_proxy();
        __syncwarp();
        const int done = box + threadIdx.x % 32;
        if (threadIdx.x % 32 < 3 && done < BOXES) mbarrier_arrive(shared_address(&shared.full[b][done]));
    }
}
#endif

// Row R of a request is head R % heads of its query token R / heads; rows past the last are zero.
DEVICE void load_queries(const Params& p, const Share& share, Shared& shared) {
    constexpr int CHUNKS = BOXES * 8;        // of 16 bytes in a row
    constexpr int UNROLL = KV_E4M3 ? 1 : 3;  // converters have no registers to spare
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - CONSUMERS / 32 - 1;
    uint32_t phase = 0;  // bit b: of raw buffer b; bit BUFFERS: of the queries
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        wait_barrier(shared.q_empty, (phase >> BUFFERS & 1) ^ 1, 20);
        const __nv_bfloat16* q = static_cast<const __nv_bfloat16*>(p.q) + piece.first_query * p.q_token_stride;
        // A warp takes every third row; dividing once, it walks on from there.
        int token = (piece.row_tile * ROWS + warp) / p.heads;
        int head = (piece.row_tile * ROWS + warp) - token * p.heads;
#pragma unroll 1
        for (int row = warp; row < ROWS; row += LOADERS / 32) {
            const bool exists = row < piece.rows;
            const __nv_bfloat16* source = exists ? q + token * p.q_token_stride + head * p.q_head_stride : q;
#pragma unroll UNROLL
            for (int i = 0; i < (CHUNKS + 31) / 32; ++i) {
                const int column = lane + i * 32;
                if (column < CHUNKS)
                    copy_16_bytes_or_zeros(
                        shared_address(shared.q[0]) + column / 8 * BOX_BYTES + row * 128 + ((column % 8) ^ (row % 8)) * 16,
                        source + column * 8, exists ? 16 : 0);
            }
            head += LOADERS / 32;
            while (head >= p.heads) head -= p.heads, ++token;
        }
        wait_for_copies();
#if KV_E4M3
        named_barrier_sync<LOADERS>(CONVERTER_BARRIER);  // others' copies are converted too
#pragma unroll 1
        for (int i = warp * 32 + lane; i < ROWS * CHUNKS; i += LOADERS) {
            const int row = i / CHUNKS, column = i % CHUNKS;
            const uint32_t place = shared_address(shared.q[column / 8]) + row * 128 + ((column % 8) ^ (row % 8)) * 16;
            const uint4 v = load_shared_16(place);
            store_shared_16(place,
                            make_uint4(fp16_of_bf16(v.x), fp16_of_bf16(v.y), fp16_of_bf16(v.z), fp16_of_bf16(v.w)));
        }
#endif
        fence_async_proxy();
        mbarrier_arrive(shared_address(&shared.q_full));
        phase ^= 1u << BUFFERS;
#if KV_E4M3
#pragma unroll 1
        for (int tile = 0; tile < piece.steps(); ++tile) {
            convert_tile(shared, tile % BUFFERS, phase >> tile % BUFFERS & 1);
            phase ^= 1u << tile % BUFFERS;
        }
#endif
    }
}

}  // namespace paged_mla_decode
