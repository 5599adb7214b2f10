// QK warpgroup of the sparse kernel in CTA groups: S^T = K Q^T, and P from it. As e4m3/qk_bf16_queries.cuh, with scales
// for each 128 columns of a key, rope columns in bf16, and the softmax.
//
// There are no registers for sums of each block of columns. A key's scales are divided by the power of two of the
// largest, so that they multiply converted keys in fp16; rope columns are divided by it too, and scores are multiplied
// with it.
#pragma once
#include "../e4m3/queries.cuh"
#include "scaled_softmax.cuh"

namespace paged_mla_decode {

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

    // A scale of a key, divided by 2^exponent.
    DEVICE float factor(int i, int block) const { return scale[i][block] * power_of_two(-exponent[i]); }

    // Of the block lane % 4, of both keys, in fp16.
    DEVICE uint32_t value_factors() const {
        uint32_t of_block[SCALE_BLOCKS];
#pragma unroll
        for (int block = 0; block < SCALE_BLOCKS; ++block)
            of_block[block] = pack_fp16(factor(0, block), factor(1, block));
        const bool odd = threadIdx.x % 2;
        return threadIdx.x % 4 < 2 ? (odd ? of_block[1] : of_block[0]) : (odd ? of_block[3] : of_block[2]);
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
            for (int block = 0; block < SCALE_BLOCKS; ++block)
                latent[i][block] = pack_fp16(own.factor(i, block), own.factor(i, block));
        }
    }
};

// S^T = K Q^T, the last products still in flight on return. `keys` is the lane's address in the stage of its warp's
// keys. Products are issued in groups of two; while GROUPS of them are in flight, the next keys are converted.
DEVICE void multiply_keys(uint32_t keys, uint32_t queries, const OwnScales& own, KeyScores& s) {
    constexpr int GROUPS = 2, AHEAD = 2;
    const FragmentFactors factors(own);
    uint32_t raw[AHEAD + 1][4], a[GROUPS][2][4];
    const auto load = [&](int i) {
        ldmatrix_x4(raw[i % (AHEAD + 1)], keys + (i < LATENT_LOADS ? i * 32 : ROPE_BYTE + (i - LATENT_LOADS) * 32));
    };
    const auto operand = [&](int step) { return queries_operand(queries, step / 4 * BOX_BYTES + step % 4 * 32); };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i);
#pragma unroll
    for (int group = 0; group < STEPS / 2; ++group) {
        uint32_t (&k)[2][4] = a[group % GROUPS];
        const bool latent = group < LATENT_LOADS;
        const int first_load = latent ? group : LATENT_LOADS + (group - LATENT_LOADS) * 2;
        const int block = group * 2 / BLOCK_STEPS;
        if (group >= GROUPS) wgmma_wait<GROUPS - 1>();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int own_load = latent ? first_load : first_load + step;
            const uint32_t (&from)[4] = raw[own_load % (AHEAD + 1)];
            if ((!latent || step == 0) && own_load + AHEAD < LOADS) load(own_load + AHEAD);
            if (latent) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    e4m3_to_fp16(from[step * 2 + i], k[step][i], k[step][2 + i]);
                    k[step][i] = multiply_fp16(k[step][i], factors.latent[i][block]);
                    k[step][2 + i] = multiply_fp16(k[step][2 + i], factors.latent[i][block]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) k[step][i] = multiply_bf16(from[i], factors.rope[i % 2]);
            }
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint64_t b = operand(group * 2 + step);
            if (group == 0 && step == 0)
                wgmma<true, false, false>(s, k[step], b);
            else if (latent)
                wgmma<true, false>(s, k[step], b);
            else
                wgmma<false, false>(s, k[step], b);
        }
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
    PipelineState<STAGES> tiles;  // at the stage of the warp's keys
    tiles.advance(reread_thread_index() % WARPGROUP / 32);
    PipelineState<P_STAGES> p_state;
    const auto publish = [&](int valid, Boundary end) {
        publish_tile(shared, p_state, reread_thread_index() % WARPGROUP == 0, valid, end);
    };
    const uint32_t queries = queries_at(shared_address(shared.q[0]));
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        load_queries(p, work, shared);
        RowSums sums = {};
        bool first = true;
#pragma unroll 1
        for (;; first = false) {
            KeyScores s;
            wait_barrier(shared.full[tiles.index], tiles.phase);
            const uint32_t stage = shared_address(shared.kv[tiles.index]), tile = shared.tile[tiles.index];
            const int valid = tile & ~LAST_TILE;
            const OwnScales own(stage + first_key() % STAGE_KEYS * KEY_PITCH);
            const uint32_t value_factors = own.value_factors();
            multiply_keys(stage + lane_offset_of_keys(), queries, own, s);
            tiles.advance(TILE_STAGES);  // PV warps free the stages, once they have the tile's P
            wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
            TileHandoff& to = shared.handoff[p_state.index];
            // 0 times the NaN that a key which does not exist may have is NaN
            uint16_t* const factors = &to.value_factor[threadIdx.x % 4][first_key()];
            factors[0] = first_key() < valid ? value_factors : 0;
            factors[8] = first_key() + 8 < valid ? value_factors >> 16 : 0;
            const KeyUnit keys[2] = {KeyUnit(own.exponent[0]), KeyUnit(own.exponent[1])};
            wgmma_wait<0>();
            fence_registers(s);
            if (valid < TILE_TOKENS) mask_missing(s, first_key(), valid);
            PairedWeights weights;
            RowSums own_sums;
            bool raised = first;
#pragma unroll 1
            for (;; raised = true) {
                if (raised) raise_maxima(s, keys, shared, to, sums);
                const bool exceeds = exponentiate(s, keys, shared, weights, own_sums);
                if (raised || !named_barrier_any<WARPGROUP>(QK_BARRIER, exceeds)) break;
            }
#pragma unroll
            for (int i = 0; i < ROWS / 4; ++i) sums[i] += own_sums[i];
            store_weights(shared_address(shared.p[p_state.index]), weights);
            if (reread_thread_index() % WARPGROUP == 0)
                *reinterpret_cast<uint4*>(to.raised) = make_uint4(raised && !first, 0, 0, 0);
            if (tile & LAST_TILE) {
                normalise_rows(p, work, shared, to, sums);
                publish(valid, work.whole() ? END_OF_OUTPUT_TILE : END_OF_SPLIT);
                break;
            }
            publish(TILE_TOKENS, INSIDE);
        }
    }
    wait_barrier(shared.p_empty[p_state.index], p_state.phase ^ 1);
    publish(0, END_OF_RANGE);
}

}  // namespace paged_mla_decode
