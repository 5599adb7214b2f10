// QK warpgroup of the sparse kernel in CTA groups: S^T = K Q^T, stored to shared memory. As e4m3/qk_bf16_queries.cuh,
// with scales for each 128 columns of a key and rope columns in bf16.
//
// There are no registers for sums of each block of columns. A key's scales are divided by the power of two of the
// largest, so that they multiply converted keys in fp16; rope columns are divided by it too, and scores are multiplied
// with it.
#pragma once
#include "../e4m3/queries.cuh"
#include "rows.cuh"

namespace paged_mla_decode {

using KeyScores = float[ROWS / 2];  // as in e4m3/qk_bf16_queries.cuh
constexpr int LATENT_STEPS = LATENT / 16, BLOCK_STEPS = LATENT_STEPS / SCALE_BLOCKS;
constexpr int LATENT_LOADS = LATENT / 32, LOADS = LATENT_LOADS + ROPE / 16;  // of 32 bytes of each key
// Of 2^exponent, which a key's scales are divided by: far from the limits of fp32 and bf16.
constexpr int LEAST_EXPONENT = -32, LARGEST_EXPONENT = 96;
static_assert(SCALE_BLOCKS == 4, "the scales of a key are one load");

// The scales of the thread's two keys.
struct OwnScales {
    float scale[2][SCALE_BLOCKS];
    int exponent[2];  // of the largest

    // `row` is the address of the first key's row.
    DEVICE explicit OwnScales(uint32_t row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 raw = load_shared_uint4(row + i * 8 * KEY_PITCH + SCALE_BYTE);
            const uint32_t bits[SCALE_BLOCKS] = {raw.x, raw.y, raw.z, raw.w};
            uint32_t largest = 0;
#pragma unroll
            for (int block = 0; block < SCALE_BLOCKS; ++block) {
                scale[i][block] = __uint_as_float(bits[block]);
                largest = max(largest, bits[block] & 0x7fffffff);
            }
            exponent[i] = min(max(static_cast<int>(largest >> 23) - 127, LEAST_EXPONENT), LARGEST_EXPONENT);
        }
    }

    // Two scales of a key, divided by 2^exponent, in fp16.
    DEVICE uint32_t factors(int i, int first, int second) const {
        const float inverse = power_of_two(-exponent[i]);
        return pack_fp16(scale[i][first] * inverse, scale[i][second] * inverse);
    }

    DEVICE void publish(KeyScales& to, int key) const {
        if (threadIdx.x % 4 != 0) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            to.exponent[key + i * 8] = make_float2(exponent[i], power_of_two(-exponent[i]));
            to.factors[key + i * 8] = make_uint2(factors(i, 0, 1), factors(i, 2, 3));
        }
    }
};

// What fragments of the thread's keys are multiplied by.
struct FragmentFactors {
    uint32_t latent[2][SCALE_BLOCKS], rope[2];

    DEVICE explicit FragmentFactors(const OwnScales& own) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float inverse = power_of_two(-own.exponent[i]);
            rope[i] = pack_bf16(inverse, inverse);
#pragma unroll
            for (int block = 0; block < SCALE_BLOCKS; ++block) latent[i][block] = own.factors(i, block, block);
        }
    }
};

// S^T = K Q^T, the last products still in flight on return. `keys` is the lane's address in the stage of its warp's
// keys.
DEVICE void multiply_keys(uint32_t keys, uint64_t queries, const OwnScales& own, KeyScores& s) {
    const FragmentFactors factors(own);
    uint32_t raw[2][4], a[KEYS_IN_FLIGHT][4];
    const auto load = [&](int i) {
        ldmatrix_x4(raw[i % 2], keys + (i < LATENT_LOADS ? i * 32 : ROPE_BYTE + (i - LATENT_LOADS) * 32));
    };
    load(0);
    load(1);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint32_t (&k)[4] = a[step % KEYS_IN_FLIGHT];
        const int block = step / BLOCK_STEPS;
        const int own_load = step < LATENT_STEPS ? step / 2 : LATENT_LOADS + step - LATENT_STEPS;
        const uint32_t (&from)[4] = raw[own_load % 2];
        if (step >= KEYS_IN_FLIGHT) wgmma_wait<KEYS_IN_FLIGHT - 1>();
        if (step < LATENT_STEPS) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                e4m3_to_fp16(from[step % 2 * 2 + i], k[i], k[2 + i]);
                k[i] = multiply_fp16(k[i], factors.latent[i][block]);
                k[2 + i] = multiply_fp16(k[2 + i], factors.latent[i][block]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) k[i] = multiply_bf16(from[i], factors.rope[i % 2]);
        }
        if ((step >= LATENT_STEPS || step % 2 == 1) && own_load + 2 < LOADS) load(own_load + 2);
        wgmma_fence();
        const uint64_t b = advance_descriptor(queries, step / 4 * BOX_BYTES + step % 4 * 32);
        if (step == 0)
            wgmma<true, false, false>(s, k, b);
        else if (step < LATENT_STEPS)
            wgmma<true, false>(s, k, b);
        else
            wgmma<false, false>(s, k, b);
        wgmma_commit();
    }
}

// The first of the thread's keys in a tile.
DEVICE int first_key() { return reread_thread_index() % WARPGROUP / 32 * 16 + reread_thread_index() % 32 / 4; }

// The lane's offset in the stage of its warp's keys.
DEVICE uint32_t lane_offset_of_keys() {
    const uint32_t thread = reread_thread_index();
    return thread % 16 * KEY_PITCH + thread % 32 / 16 * 16;
}

DEVICE void score(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const uint32_t target = shared_address(shared.scores) + lane_offset_of_scores();
    PipelineState<STAGES> tiles;  // at the stage of the warp's keys
    tiles.advance(reread_thread_index() % WARPGROUP / 32);
    uint32_t empty = 1, slot = 0;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        load_queries(p, work, shared, slot);
        slot ^= 1;
#pragma unroll 1
        for (uint32_t tile = 0; !(tile & LAST_TILE);) {
            KeyScores s;
            wait_barrier(shared.full[tiles.index], tiles.phase);
            const uint32_t stage = shared_address(shared.kv[tiles.index]);
            tile = shared.tile[tiles.index];
            const OwnScales own(stage + first_key() % STAGE_KEYS * KEY_PITCH);
            own.publish(shared.key_scales[empty], first_key());
            if (threadIdx.x % WARPGROUP == 0) shared.key_scales[empty].tile = tile;
            multiply_keys(stage + lane_offset_of_keys(), k_major_descriptor(warp_uniform(shared_address(shared.q[0]))),
                          own, s);
            fence_async_proxy();  // orders the reads before the copies that reuse the stage
            __syncwarp();
            arrive_for_warp(shared.empty[tiles.index]);
            tiles.advance(TILE_STAGES);
            wait_barrier(shared.scores_empty, empty);
            empty ^= 1;
            wgmma_wait<0>();
            fence_registers(s);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) s[i] *= power_of_two(own.exponent[i / 2 % 2]);
            write_scores(target, s);
            __syncwarp();
            arrive_for_warp(shared.scores_full);
        }
    }
}

}  // namespace paged_mla_decode
