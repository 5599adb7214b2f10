// The scoring warpgroup of the kernel for bf16 queries beside an e4m3 cache: S^T = K Q^T, to shared memory. Keys become fp16 in
// registers on their way to the product; queries are fp16 in shared memory.
//
// A warp has 16 keys of every tile: a thread has keys lane / 4 + {0, 8} of them and rows 8 j + 2 (lane % 4) + {0, 1}:
// s[4 j + 2 * key + row].
#pragma once
#include "rings.cuh"
#include "softmax.cuh"

namespace paged_mla_decode {

constexpr int STEPS = COLUMNS / 16;  // of a product in depth
constexpr int KEYS_IN_FLIGHT = 3;                   // products
constexpr int SCORING_BARRIER = 2;

// A piece's queries, four lanes for each row. Row R of a request is head R % heads of its query token R / heads; rows past the
// last are zero.
DEVICE void copy_queries(const Params& p, const Piece& piece, Shared& shared, uint32_t thread) {
    constexpr int CHUNKS = BOXES * 8;
#pragma unroll 1
    for (int row = thread / 4; row < ROWS; row += WARPGROUP / 4) {
        const bool exists = row < piece.rows;
        const char* source = static_cast<const char*>(p.q) + thread % 4 * 16;
        source += 2 * row_offset(piece, exists ? row : 0, p.heads, p.q_token_stride, p.q_head_stride);
        const uint32_t place = shared_address(shared.q[0]) + row * 128;
#pragma unroll 6
        for (int i = 0; i < CHUNKS / 4; ++i)
            copy_16_bytes_or_zeros(place + i / 2 * BOX_BYTES + ((i % 2 * 4 + thread % 4) ^ (row % 8)) * 16, source + i * 64,
                                   exists ? 16 : 0);
    }
    wait_for_copies();
    __syncwarp();
}

// They become fp16 where they lie: of 16 columns first 4 i + {0, 1}, i to 3, then 4 i + {2, 3}, which is how ldmatrix deals
// out the bytes of 16 columns of keys. A row is divided by the power of two that brings its largest magnitude below 2, which
// its scores are multiplied by, and has the sign of the softmax scale.
DEVICE void load_queries(const Params& p, const Piece& piece, Shared& shared, uint32_t slot) {
    constexpr int GROUPS = STEPS / 4;  // of 16 columns, of a lane
    const float scale = softmax_scale_log2(p);
    const uint32_t thread = thread_anew() % WARPGROUP, part = thread % 4;
    named_barrier_sync<WARPGROUP>(SCORING_BARRIER);  // no warp multiplies the last piece's any more
    copy_queries(p, piece, shared, thread);
#pragma unroll 1
    for (int row = thread / 4; row < ROWS; row += WARPGROUP / 4) {
        const uint32_t place = shared_address(shared.q[0]) + row * 128 + ((part * 2) ^ (row % 8)) * 16;
        uint32_t largest = 0;  // magnitudes in both halves: those of bf16 are ordered as integers are
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i) {
            const uint4 v = load_shared_16_bytes((place ^ i % 2 * 16) + i / 2 * BOX_BYTES);
            largest = __vmaxu2(largest, __vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff));
            largest = __vmaxu2(largest, __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
        }
        largest = max(largest & 0xffff, largest >> 16);
        for (int step = 1; step < 4; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
        const int exponent = largest > 0 ? exponent_into_fp16(largest >> 7) : 0;
        const float factor = copysignf(power_of_two(-exponent), scale);
#pragma unroll 3
        for (int i = 0; i < GROUPS; ++i) {
            const uint4 low = load_shared_16_bytes(place + i * BOX_BYTES), high = load_shared_16_bytes((place ^ 16) + i * BOX_BYTES);
            const uint32_t raw[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            uint32_t two[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 wide = unpack_bf16(raw[j]);
                two[j % 2 * 4 + j / 2] = pack_fp16(wide.x * factor, wide.y * factor);
            }
            store_shared_16_bytes(place + i * BOX_BYTES, make_uint4(two[0], two[1], two[2], two[3]));
            store_shared_16_bytes((place ^ 16) + i * BOX_BYTES, make_uint4(two[4], two[5], two[6], two[7]));
        }
        if (part == 0) shared.scale[slot][row] = fmaxf(power_of_two(exponent) * fabsf(scale), 1e-37f);  // 0 x -inf is NaN
    }
    fence_async_proxy();
    named_barrier_sync<WARPGROUP>(SCORING_BARRIER);
}

// The lane's place in its warp's keys, of which it reads 16 bytes of 32 columns.
DEVICE uint32_t place_of_keys() {
    const uint32_t thread = thread_anew(), lane = thread % 32, key = thread % WARPGROUP / 32 * 16 + lane % 16;
    return key * BOX_COLUMNS + ((lane / 16) ^ (key / 2 % 4)) * 16;
}

// A tile's keys on their way to the products.
struct Keys {
    uint32_t raw[2][4];
    uint32_t a[KEYS_IN_FLIGHT][4];

    DEVICE void load(uint32_t keys, int i) { load_matrix_x4(raw[i % 2], (keys ^ i % 2 * 32) + i / 2 * RAW_BOX_BYTES); }
    DEVICE void load(uint32_t keys) { load(keys, 0), load(keys, 1); }
};

// S^T = K Q^T, the last products under way when this returns. The first keys are loaded.
DEVICE void multiply_keys(uint32_t keys, uint64_t queries, Keys& k, Scores& s) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint32_t(&a)[4] = k.a[step % KEYS_IN_FLIGHT];
        if (step >= KEYS_IN_FLIGHT) wgmma_wait<KEYS_IN_FLIGHT - 1>();
#pragma unroll
        for (int i = 0; i < 2; ++i) e4m3_to_fp16(k.raw[step / 2 % 2][step % 2 * 2 + i], a[i], a[2 + i]);
        if (step % 2 == 1 && step / 2 + 2 < STEPS / 2) k.load(keys, step / 2 + 2);
        wgmma_fence();
        const uint64_t b = advance_operand(queries, step / 4 * BOX_BYTES + step % 4 * 32);
        if (step == 0)
            wgmma<true, false, false>(s, a, b);
        else
            wgmma<true, false>(s, a, b);
        wgmma_commit();
    }
}

// To where the softmax reads them.
DEVICE void write_scores(uint32_t place, const Scores& s) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 2; ++i)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(place + (i / 4 * 8 + i % 2) * SCORE_PITCH + i / 2 % 2 * 32), "f"(s[i])
                     : "memory");
}

DEVICE uint32_t place_of_scores() {
    const uint32_t thread = thread_anew() % WARPGROUP;
    return thread % 4 * 2 * SCORE_PITCH + thread / 4 * 4 + thread / 32 * 32;
}

DEVICE void score(const Params& p, const Share& share, Shared& shared) {
    const uint32_t place = place_of_keys(), target = shared_address(shared.scores) + place_of_scores();
    Turn<BUFFERS> tiles;
    uint32_t empty = 1, slot = 0;
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece)) {
        const int steps = piece.steps();
        if (steps == 0) continue;
        load_queries(p, piece, shared, slot);
        slot ^= 1;
#pragma unroll 1
        for (int left = steps; left > 0; --left) {
            Scores s;
            Keys keys;
            const uint32_t tile = place + shared_address(shared.kv[tiles.index]);
            wait_barrier(shared.full[tiles.index], tiles.parity);
            keys.load(tile);
            multiply_keys(tile, depth_major_operand(uniform(shared_address(shared.q[0]))), keys, s);
            fence_async_proxy();  // what was read comes before what a copy writes there
            __syncwarp();
            arrive_for_warp(shared.empty[tiles.index]);
            tiles.advance();
            wait_barrier(shared.scores_empty, empty);
            empty ^= 1;
            wgmma_wait<0>();
            hold_registers(s);
            write_scores(target, s);
            __syncwarp();
            arrive_for_warp(shared.scores_full);
        }
    }
}

}  // namespace paged_mla_decode
