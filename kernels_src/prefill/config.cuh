// Build options of context attention (-D), the constants that follow from them, and the layout of shared memory.
#pragma once
#include "../common/paged_kv.cuh"
#include "../common/pipeline.cuh"
#include "../common/segments.cuh"
#include "../common/wgmma.cuh"
#if KV_E4M3
#include "ContextAttentionE4m3Params.h"
#else
#include "ContextAttentionParams.h"
#endif

namespace context_attention {

#if KV_E4M3
using Params = ContextAttentionE4m3Params;
#else
using Params = ContextAttentionParams;
#endif

// 1: the keys of a request are divided among gridDim.y CTAs, wherever its row tiles end; each writes a part of the
// output.
#ifndef SPLIT_KEYS
#define SPLIT_KEYS 0
#endif
static_assert(!SPLIT_KEYS || !SEGMENTS, "parts are merged in another way than segments");

constexpr int WARPGROUP = 128;
constexpr int WARPGROUP_ROWS = 64;
constexpr int ROWS = WARPGROUP_ROWS * WARPGROUPS;
constexpr int CONSUMERS = WARPGROUP * WARPGROUPS;
constexpr int CONSUMER_WARPS = CONSUMERS / 32;
// e4m3: one producer warpgroup converts keys and values in place, in turn; or two convert one of them each, from a
// buffer of its own.
#ifndef PRODUCER_WARPGROUPS
#define PRODUCER_WARPGROUPS 1
#endif
constexpr bool CONVERTS_APART = PRODUCER_WARPGROUPS == 2;
constexpr int PRODUCERS = WARPGROUP * PRODUCER_WARPGROUPS;
constexpr int THREADS = CONSUMERS + PRODUCERS;  // setmaxnreg moves registers between whole warpgroups
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;  // of a thread, before setmaxnreg moves some
#if KV_E4M3
constexpr int FILLING_WARPS = WARPGROUP / 32;  // all warps of a producer warpgroup convert
constexpr int OTHER_PRODUCERS = PRODUCERS / 32 - 1;
constexpr int CONSUMER_REGISTERS = CONVERTS_APART ? 208 : 216;
constexpr int PRODUCER_REGISTERS = CONVERTS_APART ? 48 : 72;
#else
constexpr int FILLING_WARPS = 1;  // that load K, and that load V: they arrive at the barrier of a full stage
constexpr int OTHER_PRODUCERS = 1;  // beside the warp that finds work tiles
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : 160;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 32;
#endif
static_assert(WARPGROUPS * CONSUMER_REGISTERS + PRODUCER_WARPGROUPS * PRODUCER_REGISTERS <=
                  THREADS / WARPGROUP * LAUNCH_REGISTERS,
              "setmaxnreg would wait for ever");

constexpr int SPAN_COLUMNS = 64;  // columns of a TMA box: 128 bytes, which are swizzled
constexpr int K_SPANS = HEAD_DIM / SPAN_COLUMNS;  // of queries and keys
constexpr int V_SPANS = VALUE_DIM / SPAN_COLUMNS;
constexpr int ROW_BYTES = 128;
constexpr int KV_SPAN_BYTES = TILE_TOKENS * ROW_BYTES;
constexpr int Q_SPAN_BYTES = WARPGROUP_ROWS * ROW_BYTES;
// Columns of the output that a warp's rows pass through shared memory at a time: all, or as many as there is room for.
constexpr int STAGED_COLUMNS = HEAD_DIM > 128 ? 64 : VALUE_DIM;
// Keys and values as they lie in TMA boxes: as in shared memory, or e4m3, which producers convert to the type of q.
constexpr int K_BOX_BYTES = KV_E4M3 && HEAD_DIM % 128 != 0 ? 64 : ROW_BYTES;  // of a row
constexpr int V_BOX_BYTES = KV_E4M3 && VALUE_DIM % 128 != 0 ? 64 : ROW_BYTES;
constexpr int KV_BYTES = KV_E4M3 ? 1 : 2;  // of an element
constexpr int SEGMENT_TILES = SEGMENT_TOKENS / TILE_TOKENS;
// Outputs of earlier segments: where a warp's rows of the output are staged later.
// Their statistics and factors too, where registers are scarcer than shared memory.
constexpr bool FOLDS_IN_SHARED = SEGMENTS && VALUE_DIM == 64;
constexpr int FOLDED_WARP_BYTES = SEGMENTS ? 16 * VALUE_DIM * 4 + (FOLDS_IN_SHARED ? 2 * 32 * 16 : 0) : 0;
static_assert(!SEGMENTS || TILE_TOKENS == SEGMENT_TILE_TOKENS, "decode has the same tiles");
static_assert(!SEGMENTS || STAGED_COLUMNS == VALUE_DIM, "they are staged whole");
static_assert(!CONVERTS_APART || (KV_E4M3 && !SEGMENTS), "rows of the output are not staged");
static_assert(TILE_TOKENS == 128 || TILE_TOKENS == 64, "the products' shapes");

// Named barriers; 0 is that of __syncthreads.
constexpr int TURN = 1;  // and up, one for each warpgroup
constexpr int WARPGROUP_BARRIER = TURN + WARPGROUPS;  // and up
constexpr int CONVERTER_BARRIER = WARPGROUP_BARRIER + WARPGROUPS;  // of the producer warps

// A row tile of a head pack of a request; `first` to `last` are the key tiles that one of its rows sees.
struct WorkTile {
    int request;  // -1: none is left
    int q_begin, q_len;  // query tokens of the request
    int token;  // the first of the row tile, within the request
    int head;  // the first
    int kv_begin, kv_len;  // ragged: the first key; keys of the request
    int first, last;
#if KV_E4M3
    float scale_log2, output_scale;  // with those of keys and values
#endif
};

struct SharedStorage {
    alignas(1024) uint8_t q[WARPGROUPS][K_SPANS][Q_SPAN_BYTES];
    alignas(1024) uint8_t k[K_STAGES][K_SPANS][KV_SPAN_BYTES];
    alignas(1024) uint8_t v[V_STAGES][V_SPANS][KV_SPAN_BYTES];
#if PRODUCER_WARPGROUPS == 2
    alignas(1024) uint8_t raw_k[K_SPANS * KV_SPAN_BYTES / 2], raw_v[V_SPANS * KV_SPAN_BYTES / 2];  // e4m3
#endif
    alignas(128) uint8_t out[CONVERTS_APART ? 1 : CONSUMER_WARPS][SEGMENTS         ? FOLDED_WARP_BYTES
                                                                  : CONVERTS_APART ? 1
                                                                                   : 16 * STAGED_COLUMNS * 2];
    WorkTile work[2];
    uint64_t q_full, q_empty;
    uint64_t k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
#if KV_E4M3
    uint64_t k_loaded[K_STAGES], v_loaded[V_STAGES];  // e4m3 is there, to be converted
#if PRODUCER_WARPGROUPS == 2
    uint64_t k_read, v_read;  // it has been converted
#endif
#endif
};

DEVICE void wait_barrier(uint64_t& barrier, uint32_t phase) { mbarrier_wait(shared_address(&barrier), phase); }

// Arrives for a warp, which is done with what the barrier guards.
DEVICE void release(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

// The position of a query token in its request; the last token is at the last key.
DEVICE int position_of(const WorkTile& work, int token) { return work.kv_len - work.q_len + token; }

// The first key that a row at a position sees, and the end of those that it sees.
DEVICE int first_visible(const Params& p, int position) { return max(0, position - p.window_left); }
DEVICE int visible_end(const Params& p, const WorkTile& work, int position) {
    return max(0, min(work.kv_len, position + p.window_right + 1));
}

}  // namespace context_attention
