// A cache of e4m3 beside queries of bf16: one warp brings raw tiles, the others bring the queries and convert both to fp16.
#pragma once
#include "loading.cuh"

namespace paged_mla_decode {

constexpr int CONVERTER_BARRIER = 7;
constexpr int LOADERS = HELPERS - 32;  // of queries, and converters: the warps beside the producer's

// The raw boxes lie where the first half of the converted ones will be, the rope's apart.
DEVICE uint32_t raw_box(Shared& shared, int b, int box) {
    return box == ROPE_BOX ? shared_address(shared.raw_rope[b]) : shared_address(shared.kv[b]) + box * (BOX_BYTES / 2);
}

// One warp brings the raw tiles.
DEVICE void produce(const Params& p, const Share& share, Shared& shared) {
    const int chunk_log2 = chunk_tokens_log2(p);
    const uint64_t policy = keys_policy(p);
    uint32_t phase = 0;  // bit b: of the next wait for buffer b to be empty
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        PageWindow pages;
        const int last = piece.first + piece.steps();
#pragma unroll 1
        for (int tile = piece.first; tile < last; ++tile) {
            const TilePages at(p, piece, pages, chunk_log2, tile);
            const int b = (tile - piece.first) % BUFFERS;
            // Those whose places the raw boxes take.
            wait_barrier(shared.empty[b][0], (phase >> b & 1) ^ 1);
            wait_barrier(shared.empty[b][1], (phase >> b & 1) ^ 1);
            if (elect_one()) {
                const uint32_t full = shared_address(&shared.raw[b]);
                mbarrier_arrive_expect_bytes(full, BOXES * at.chunks << (chunk_log2 + ROW_BYTES_LOG2));
#pragma unroll 1
                for (int box = 0; box < BOXES; ++box) copy_box(p, at, chunk_log2, box, raw_box(shared, b, box), full, policy);
            }
            __syncwarp();
            phase ^= 1u << b;
        }
    }
}

DEVICE uint32_t fp16_of_bf16(uint32_t two, float factor) {
    const float2 wide = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
    return pack_fp16(wide.x * factor, wide.y * factor);
}

// Boxes FIRST to FIRST + COUNT of a tile from e4m3 to fp16; those from HALF_BOXES on are not written over raw ones. A chunk
// is 16 raw bytes; rows and boxes follow each other in both forms.
template <int FIRST, int COUNT>
DEVICE void convert_boxes(Shared& shared, int b, int thread) {
    constexpr int BOX_CHUNKS = BOX_BYTES / 32, CHUNKS_HERE = COUNT * BOX_CHUNKS;
    constexpr int ROUNDS = (CHUNKS_HERE + LOADERS - 1) / LOADERS, AT_ONCE = 3;
    constexpr bool OVER_RAW = FIRST < HALF_BOXES;
    static_assert(!OVER_RAW || ROUNDS <= AT_ONCE);
    // A thread's chunks are LOADERS apart, a multiple of 32: their rows differ by multiples of 8, their swizzle does not.
    static_assert(LOADERS % 32 == 0);
    const uint32_t raw_chunk = (thread ^ (thread / 8 % 4)) * 16;
    const uint32_t raw = raw_box(shared, b, FIRST) + raw_chunk;
    const uint32_t raw_rope = raw_box(shared, b, ROPE_BOX) + raw_chunk - (ROPE_BOX - FIRST) * BOX_CHUNKS * 16;
    const uint32_t place = shared_address(shared.kv[b][FIRST]) + thread / 4 * 128 + ((thread % 4 * 2) ^ (thread / 4 % 8)) * 16;
    const auto exists = [&](int i) { return (i + 1) * LOADERS <= CHUNKS_HERE || thread < CHUNKS_HERE - i * LOADERS; };
#pragma unroll
    for (int base = 0; base < ROUNDS; base += AT_ONCE) {
        uint4 own[AT_ONCE];
#pragma unroll
        for (int i = base; i < base + AT_ONCE && i < ROUNDS; ++i) {
            const bool rope = FIRST + COUNT > ROPE_BOX && thread + i * LOADERS >= (ROPE_BOX - FIRST) * BOX_CHUNKS;
            if (exists(i)) own[i - base] = load_shared_16_bytes((rope ? raw_rope : raw) + i * LOADERS * 16);
        }
        if (OVER_RAW) named_barrier_sync<LOADERS>(CONVERTER_BARRIER);  // all have read what is written over
#pragma unroll
        for (int i = base; i < base + AT_ONCE && i < ROUNDS; ++i) {
            if (!exists(i)) break;
            const uint4 four = own[i - base];
            uint4 half[2];
            e4m3_to_fp16(four.x, half[0].x, half[0].y);
            e4m3_to_fp16(four.y, half[0].z, half[0].w);
            store_shared_16_bytes(place + i * LOADERS * 32, half[0]);
            e4m3_to_fp16(four.z, half[1].x, half[1].y);
            e4m3_to_fp16(four.w, half[1].z, half[1].w);
            store_shared_16_bytes((place ^ 16) + i * LOADERS * 32, half[1]);
        }
    }
    fence_async_proxy();
    __syncwarp();
    const int done = FIRST + threadIdx.x % 32;
    if (threadIdx.x % 32 < COUNT) mbarrier_arrive(shared_address(&shared.full[b][done]));
}

// The boxes of a tile, the last half first: box i is written over the raw boxes 2 i and 2 i + 1, which by then all have read.
DEVICE void convert_tile(Shared& shared, int b, uint32_t parity) {
    const int thread = threadIdx.x - CONSUMERS - 32;
    wait_barrier(shared.raw[b], parity);
    wait_barrier(shared.empty[b][2], parity ^ 1);
    wait_barrier(shared.empty[b][3], parity ^ 1);
    convert_boxes<HALF_BOXES, BOXES - HALF_BOXES>(shared, b, thread);
    if constexpr (HALF_BOXES == 4) convert_boxes<2, 2>(shared, b, thread);
    convert_boxes<1, 1>(shared, b, thread);
    convert_boxes<0, 1>(shared, b, thread);
}

DEVICE uint32_t query_place(Shared& shared, int row, int column) {
    return shared_address(shared.q[0]) + column / 8 * BOX_BYTES + row * 128 + ((column % 8) ^ (row % 8)) * 16;
}

// A row of bf16 becomes fp16, divided by the power of two that brings its largest magnitude below 2, which the scores of the
// row are multiplied by. Each lane converts what it copied.
DEVICE void convert_query(Shared& shared, int row) {
    constexpr int ROUNDS = (CHUNKS + 31) / 32;
    const int lane = threadIdx.x % 32;
    uint4 own[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int column = lane + i * 32;
        own[i] = column < CHUNKS ? load_shared_16_bytes(query_place(shared, row, column)) : make_uint4(0, 0, 0, 0);
    }
    uint32_t largest = 0;  // magnitudes in both halves: those of bf16 are ordered as integers are
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        largest = __vmaxu2(largest, __vmaxu2(own[i].x & 0x7fff7fff, own[i].y & 0x7fff7fff));
        largest = __vmaxu2(largest, __vmaxu2(own[i].z & 0x7fff7fff, own[i].w & 0x7fff7fff));
    }
    largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
    // At 112 the largest bf16 is just within fp16, and the power is no danger to the softmax scale.
    const int exponent = largest > 0 ? min(max(static_cast<int>(largest >> 7) - 127, -100), 112) : 0;
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int column = lane + i * 32;
        if (column >= CHUNKS) break;
        const uint4 v = own[i];
        store_shared_16_bytes(query_place(shared, row, column),
                              make_uint4(fp16_of_bf16(v.x, factor), fp16_of_bf16(v.y, factor), fp16_of_bf16(v.z, factor),
                                         fp16_of_bf16(v.w, factor)));
    }
    if (lane == 0) shared.q_power[row] = power_of_two(exponent);
}

// Rows as in copy_queries, raw, then converted. A warp takes every LOADERS / 32-th; dividing once, it walks on from there.
DEVICE void load_rows(const Params& p, const Piece& piece, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - CONSUMERS / 32 - 1;
    const char* q = static_cast<const char*>(p.q) + piece.first_query * p.q_token_stride * 2;
    int token = (piece.row_tile * ROWS + warp) / p.heads;
    int head = (piece.row_tile * ROWS + warp) - token * p.heads;
#pragma unroll 1
    for (int row = warp; row < ROWS; row += LOADERS / 32) {
        const bool exists = row < piece.rows;
        const char* source = exists ? q + (token * p.q_token_stride + head * p.q_head_stride) * 2 : q;
#pragma unroll 1
        for (int column = lane; column < CHUNKS; column += 32)
            copy_16_bytes_or_zeros(query_place(shared, row, column), source + column * 16, exists ? 16 : 0);
        head += LOADERS / 32;
        while (head >= p.heads) head -= p.heads, ++token;
    }
    wait_for_copies();
#pragma unroll 1
    for (int row = warp; row < ROWS; row += LOADERS / 32) convert_query(shared, row);
}

// The other warps bring the queries and convert what comes raw.
DEVICE void load_queries(const Params& p, const Share& share, Shared& shared) {
    constexpr uint32_t BEGUN = 2 << BUFFERS;
    uint32_t phase = 0;  // bit b: of raw buffer b; bit BUFFERS: of the queries; and BEGUN
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        wait_barrier(shared.q_empty, (phase >> BUFFERS & 1) ^ 1);
        if (!(phase & BEGUN) || piece.part == 0) load_rows(p, piece, shared);  // else this CTA had the part before
        phase |= BEGUN;
        fence_async_proxy();
        mbarrier_arrive(shared_address(&shared.q_full));
        phase ^= 1u << BUFFERS;
#pragma unroll 1
        for (int left = piece.steps(), b = 0; left > 0; --left, b ^= 1) {
            convert_tile(shared, b, phase >> b & 1);
            phase ^= 1u << b;
        }
    }
}

DEVICE void load(const Params& p, const Share& share, Shared& shared) {
    if (threadIdx.x < CONSUMERS + 32)
        produce(p, share, shared);
    else
        load_queries(p, share, shared);
}

}  // namespace paged_mla_decode
