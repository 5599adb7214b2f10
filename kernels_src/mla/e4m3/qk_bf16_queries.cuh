// QK warpgroup for bf16 queries and an e4m3 cache: S^T = K Q^T, stored to shared memory. Keys are converted to fp16 in
// registers on their way to the product; queries are fp16 in shared memory.
//
// A warp has 16 keys of every tile. A thread has keys lane / 4 + {0, 8} of them and rows 8 j + 2 (lane % 4) + {0, 1}:
// s[4 j + 2 * key + row].
#pragma once
#include "queries.cuh"

namespace paged_mla_decode {

constexpr int KEYS_IN_FLIGHT = 3;  // products

// The lane's offset in its warp's keys, of which it reads 16 bytes of 32 columns.
DEVICE uint32_t lane_offset_of_keys() {
    const uint32_t thread = reread_thread_index(), lane = thread % 32, key = thread % WARPGROUP / 32 * 16 + lane % 16;
    return key * BOX_COLUMNS + ((lane / 16) ^ (key / 2 % 4)) * 16;
}

// A tile's keys in flight to the products.
struct Keys {
    uint32_t raw[2][4];
    uint32_t a[KEYS_IN_FLIGHT][4];

    DEVICE void load(uint32_t keys, int i) { ldmatrix_x4(raw[i % 2], (keys ^ i % 2 * 32) + i / 2 * RAW_BOX_BYTES); }
    DEVICE void load(uint32_t keys) { load(keys, 0), load(keys, 1); }
};

// S^T = K Q^T, the last products still in flight on return. The first keys must be loaded.
DEVICE void multiply_keys(uint32_t keys, uint64_t queries, Keys& k, Scores& s) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint32_t (&a)[4] = k.a[step % KEYS_IN_FLIGHT];
        if (step >= KEYS_IN_FLIGHT) wgmma_wait<KEYS_IN_FLIGHT - 1>();
#pragma unroll
        for (int i = 0; i < 2; ++i) e4m3_to_fp16(k.raw[step / 2 % 2][step % 2 * 2 + i], a[i], a[2 + i]);
        if (step % 2 == 1 && step / 2 + 2 < STEPS / 2) k.load(keys, step / 2 + 2);
        wgmma_fence();
        const uint64_t b = advance_descriptor(queries, step / 4 * BOX_BYTES + step % 4 * 32);
        if (step == 0)
            wgmma<true, false, false>(s, a, b);
        else
            wgmma<true, false>(s, a, b);
        wgmma_commit();
    }
}

// Stores scores where the softmax reads them.
DEVICE void write_scores(uint32_t address, const float (&s)[ROWS / 2]) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i)
        store_shared_float(address + (i / 4 * 8 + i % 2) * SCORE_PITCH + i / 2 % 2 * 32, s[i]);
}

DEVICE uint32_t lane_offset_of_scores() {
    const uint32_t thread = reread_thread_index() % WARPGROUP;
    return thread % 4 * 2 * SCORE_PITCH + thread / 4 * 4 + thread / 32 * 32;
}

DEVICE void score(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const uint32_t lane_offset = lane_offset_of_keys(),
                   target = shared_address(shared.scores) + lane_offset_of_scores();
    PipelineState<STAGES> tiles;
    uint32_t empty = 1, slot = 0;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        const int steps = work.key_tiles();
        if (steps == 0) continue;
        load_queries(p, work, shared, slot);
        slot ^= 1;
#pragma unroll 1
        for (int left = steps; left > 0; --left) {
            Scores s;
            Keys keys;
            const uint32_t tile = lane_offset + shared_address(shared.kv[tiles.index]);
            wait_barrier(shared.full[tiles.index], tiles.phase);
            keys.load(tile);
            multiply_keys(tile, k_major_descriptor(warp_uniform(shared_address(shared.q[0]))), keys, s);
            fence_async_proxy();  // orders the reads before the TMA write that reuses the stage
            __syncwarp();
            arrive_for_warp(shared.empty[tiles.index]);
            tiles.advance();
            wait_barrier(shared.scores_empty, empty);
            empty ^= 1;
            wgmma_wait<0>();
            fence_registers(s);
            write_scores(target, s);
            __syncwarp();
            arrive_for_warp(shared.scores_full);
        }
    }
}

}  // namespace paged_mla_decode
