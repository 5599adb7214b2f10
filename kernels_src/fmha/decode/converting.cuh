// The converters: a warpgroup that turns e4m3 tiles of the ring into fp16 ones, which the consumers' products read.
#pragma once
#include "work.cuh"

namespace paged_decode {

constexpr int PRODUCT_SPAN_BYTES = TILE_TOKENS * 128;  // 64 head dims of a tile, 16 bits each, in a 128-byte swizzle

// Tokens of a tile that any row may see; the others may hold anything.
struct Seen {
    int low, high;
    DEVICE Seen(const Piece& piece, int tile_token)
        : low(max(piece.begin - tile_token, 0)), high(min(piece.request.length - tile_token, TILE_TOKENS)) {}
    DEVICE bool all() const { return low == 0 && high == TILE_TOKENS; }
    DEVICE bool has(int token) const { return token >= low && token < high; }
};

DEVICE int tiles_with_keys(const Piece& piece) { return max(0, end_of_keys(piece) - piece.first); }

DEVICE int first_token(const Piece& piece, int tile) { return (piece.request.first_tile + piece.first + tile) * TILE_TOKENS; }

#if KV_E4M3
// A thread's units of 16 e4m3 in a tile. Eight neighbouring lanes take four columns of two tokens whose low bits and bits 2
// differ, so that neither what they read nor what they write meets in a bank.
struct Conversion {
    int token;          // of the first unit
    uint32_t from, to;  // its place; its second half lies 16 bytes on or back
    static constexpr int COLUMN_SETS = HEAD_DIM / 64;  // of four units, which are 64 head dims
    static constexpr int ROUND_TOKENS = CONVERTERS / 4;
    static constexpr int ROUNDS = TILE_TOKENS / ROUND_TOKENS * COLUMN_SETS;
    DEVICE Conversion() {
        const int lane = threadIdx.x % 32, column = lane % 4;
        token = threadIdx.x % CONVERTERS / 32 * 8 + (lane / 8 ^ lane / 4 % 2 * 5);
        from = tile_address(0, token, column);
        to = token * 128 + (column * 2 ^ token % 8) * 16;
    }
    DEVICE static int set_of(int round) { return round % COLUMN_SETS; }
    DEVICE static int tokens_of(int round) { return round / COLUMN_SETS * ROUND_TOKENS; }
    // Units of the second set lie 64 bytes on in a row of 128, which the swizzle turns into an exclusive or.
    DEVICE uint32_t from_of(int round) const { return (from ^ set_of(round) * 64) + tokens_of(round) * SPAN; }
    DEVICE uint32_t to_of(int round) const { return to + set_of(round) * PRODUCT_SPAN_BYTES + tokens_of(round) * 128; }
};

// A tile's keys or values. CLEAR: those of tokens that are not seen become zeros, since they may be NaN, and 0 x NaN is NaN.
template <bool CLEAR>
DEVICE void convert(const Conversion& c, uint32_t from, uint32_t to, const Seen& seen) {
    constexpr int AHEAD = 4;  // loads in flight
#pragma unroll
    for (int base = 0; base < Conversion::ROUNDS; base += AHEAD) {
        uint4 raw[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD && base + i < Conversion::ROUNDS; ++i) {
            raw[i] = load_shared_16_bytes(from + c.from_of(base + i));
            if (CLEAR && !seen.has(c.token + c.tokens_of(base + i))) raw[i] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AHEAD && base + i < Conversion::ROUNDS; ++i) {
            const uint32_t target = to + c.to_of(base + i);
            uint4 half[2];
            e4m3_to_fp16(raw[i].x, half[0].x, half[0].y);
            e4m3_to_fp16(raw[i].y, half[0].z, half[0].w);
            e4m3_to_fp16(raw[i].z, half[1].x, half[1].y);
            e4m3_to_fp16(raw[i].w, half[1].z, half[1].w);
            store_shared_16_bytes(target, half[0]);
            store_shared_16_bytes(target ^ 16, half[1]);
        }
    }
}

// The tile in the ring at `raw` becomes the one at `converted`; both move on.
template <bool VALUES>
DEVICE void convert_next(Shared& shared, const Conversion& conversion, const Seen& seen, RingCursor& raw,
                         ConvertedCursor& converted) {
    mbarrier_wait(shared_address(&shared.full[raw.index]), raw.phase);
    mbarrier_wait(shared_address(&shared.converted_empty[converted.index]), converted.phase ^ 1);  // fresh: emptied once
    const uint32_t from = shared_address(shared.ring[raw.index]), to = shared_address(shared.converted[converted.index]);
    if (!VALUES || seen.all())
        convert<false>(conversion, from, to, seen);
    else
        convert<true>(conversion, from, to, seen);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(shared_address(&shared.converted_full[converted.index]));
        mbarrier_arrive(shared_address(&shared.empty[raw.index]));
    }
    raw.advance();
    converted.advance();
}

DEVICE void convert_tiles(const Params& p, const Share& share, Shared& shared) {
    const Conversion conversion;
    RingCursor raw;
    ConvertedCursor converted;
    for_each_piece(p, share, [&](const Piece& piece) {
        const int tiles = tiles_with_keys(piece);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            const Seen seen(piece, first_token(piece, tile));
            if (KEYS_CONVERTED)
                convert_next<false>(shared, conversion, seen, raw, converted);
            else
                raw.advance();
            convert_next<true>(shared, conversion, seen, raw, converted);
        }
        named_barrier_sync<CONSUMERS + CONVERTERS>(MERGED_BARRIER);
    });
}
#endif

}  // namespace paged_decode
