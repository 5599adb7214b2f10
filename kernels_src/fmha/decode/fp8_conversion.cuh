// Converter warpgroup: turns e4m3 tiles of the first pipeline into tiles of a second one in the products' type, which
// the products read.
#pragma once
#include "queries.cuh"

namespace paged_decode {

// The tokens of a tile that any row may see; the others may hold anything.
struct VisibleTokens {
    int low, high;
    DEVICE VisibleTokens(const WorkTile& work, int tile_token)
        : low(max(work.begin - tile_token, 0)), high(min(work.request.kv_len - tile_token, TILE_TOKENS)) {}
    DEVICE bool all() const { return low == 0 && high == TILE_TOKENS; }
    DEVICE bool has(int token) const { return token >= low && token < high; }
};

DEVICE int tiles_with_keys(const WorkTile& work) { return max(0, end_tile(work) - work.first); }

DEVICE int first_token(const WorkTile& work, int tile) {
    return (work.request.first_tile + work.first + tile) * TILE_TOKENS;
}

#if KV_E4M3
// A thread's units of 16 e4m3 in a tile. Eight neighbouring lanes take four columns of two tokens that differ in bits 0
// and 2, so that neither their loads nor their stores have bank conflicts.
struct Conversion {
    int token;  // of the first unit
    uint32_t from, to;  // its offsets; the other half of a converted unit is at `to` ^ 16
    static constexpr int COLUMN_SETS = HEAD_DIM / 64;  // of four units, which are 64 head dims
    static constexpr int ROUND_TOKENS = CONVERTERS / 4;
    static constexpr int ROUNDS = TILE_TOKENS / ROUND_TOKENS * COLUMN_SETS;
    DEVICE Conversion() {
        const int lane = threadIdx.x % 32, column = lane % 4;
        token = threadIdx.x % CONVERTERS / 32 * 8 + (lane / 8 ^ lane / 4 % 2 * 5);
        from = tile_address(0, token, column);
        to = token * PRODUCT_SPAN + (column * 2 ^ token % 8) * 16;
    }
    DEVICE static int set_of(int round) { return round % COLUMN_SETS; }
    DEVICE static int tokens_of(int round) { return round / COLUMN_SETS * ROUND_TOKENS; }
    // The second set of columns lies 64 bytes further in a row of 128; with the swizzle that is an exclusive or.
    DEVICE uint32_t from_of(int round) const { return (from ^ set_of(round) * 64) + tokens_of(round) * SPAN; }
    DEVICE uint32_t to_of(int round) const {
        return to + set_of(round) * PRODUCT_SPAN_BYTES + tokens_of(round) * PRODUCT_SPAN;
    }
};

// Converts the keys or values of a tile. CLEAR: those of invisible tokens become zeros, since they may be NaN and 0 x
// NaN is NaN.
template <bool CLEAR>
DEVICE void convert(const Conversion& c, uint32_t from, uint32_t to, const VisibleTokens& visible) {
    constexpr int LOADS_IN_FLIGHT = 4;
#pragma unroll
    for (int base = 0; base < Conversion::ROUNDS; base += LOADS_IN_FLIGHT) {
        uint4 raw[LOADS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT && base + i < Conversion::ROUNDS; ++i) {
            raw[i] = load_shared_uint4(from + c.from_of(base + i));
            if (CLEAR && !visible.has(c.token + c.tokens_of(base + i))) raw[i] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT && base + i < Conversion::ROUNDS; ++i) {
            const uint32_t target = to + c.to_of(base + i);
            uint4 half[2];
            convert_e4m3(raw[i].x, half[0].x, half[0].y);
            convert_e4m3(raw[i].y, half[0].z, half[0].w);
            convert_e4m3(raw[i].z, half[1].x, half[1].y);
            convert_e4m3(raw[i].w, half[1].z, half[1].w);
            store_shared_uint4(target, half[0]);
            store_shared_uint4(target ^ 16, half[1]);
        }
    }
}

// Converts the tile at `raw` of the first pipeline to the tile at `converted` of the second; both advance.
template <bool VALUES>
DEVICE void convert_next(SharedStorage& shared, const Conversion& conversion, const VisibleTokens& visible,
                         StageState& raw, ConvertedState& converted) {
    mbarrier_wait(shared_address(&shared.full[raw.index]), raw.phase);
    // passes at once in the first pass
    mbarrier_wait(shared_address(&shared.converted_empty[converted.index]), converted.phase ^ 1);
    const uint32_t from = shared_address(shared.stages[raw.index]),
                   to = shared_address(shared.converted[converted.index]);
    if (!VALUES || visible.all())
        convert<false>(conversion, from, to, visible);
    else
        convert<true>(conversion, from, to, visible);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(shared_address(&shared.converted_full[converted.index]));
        mbarrier_arrive(shared_address(&shared.empty[raw.index]));
    }
    raw.advance();
    converted.advance();
}

DEVICE void convert_tiles(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const Conversion conversion;
    StageState raw;
    ConvertedState converted;
    for_each_work_tile(p, range, [&](const WorkTile& work) {
        const int kv_tiles = tiles_with_keys(work);
#pragma unroll 1
        for (int tile = 0; tile < kv_tiles; ++tile) {
            const VisibleTokens visible(work, first_token(work, tile));
            if (KEYS_CONVERTED)
                convert_next<false>(shared, conversion, visible, raw, converted);
            else
                raw.advance();
            convert_next<true>(shared, conversion, visible, raw, converted);
        }
        if constexpr (!SEGMENTS) named_barrier_sync<CONSUMERS + CONVERTERS>(MERGED_BARRIER);
    });
}
#endif

}  // namespace paged_decode
