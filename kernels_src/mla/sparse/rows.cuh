// Rows of a cache that lists name: their layout in memory and in a stage.
#pragma once
#include "../scheduler.cuh"

namespace paged_mla_decode {

// A row of the cache as it lies in memory: the latent columns, with e4m3 ones a float for each 128 of them by which
// they are to be multiplied, then bf16 rope columns. In a stage, rows lie so far apart that no two of eight begin in
// one bank.
constexpr int SCALE_BYTE = LATENT;  // in a row
constexpr int ROPE_BYTE = SCALE_BYTE + SCALE_BLOCKS * 4;
constexpr int ROW_BYTES = KV_E4M3 ? ROPE_BYTE + ROPE * 2 : COLUMNS * 2;
constexpr int KEY_PITCH = ROW_BYTES / 16 % 2 ? ROW_BYTES : ROW_BYTES + 16;
static_assert(ROW_BYTES % 16 == 0, "pieces of a bulk copy");

// A tile of the pipeline has its keys, of which only the last of a work tile may have fewer than TILE_TOKENS, and this.
constexpr uint32_t LAST_TILE = 1u << 31;
// Rows that are still to be copied wait in a ring, of which each producer warp has every so many-th RING_SHARE.
constexpr int ROW_RING = 2 * TILE_TOKENS, RING_SHARE = 16;

// The low half of the descriptor of queries in shared memory, 32 bits of which the compiler must know none: it would
// mask those of each operand.
DEVICE uint32_t queries_at(uint32_t address) {
    return warp_uniform(static_cast<uint32_t>(k_major_descriptor(address)));
}

// The operand so many bytes behind.
DEVICE uint64_t queries_operand(uint32_t queries, uint32_t bytes) {
    return (k_major_descriptor(0) & 0xffffffff00000000) | (queries + (bytes >> 4));
}

DEVICE uint32_t multiply_fp16(uint32_t a, uint32_t b) {
    const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&product);
}

DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&product);
}

}  // namespace paged_mla_decode
