// The producer warps of e4m3 caches: all convert keys and values to the type of q, two of them load as well.
//
// One warpgroup:
//
//   warp 0: work tiles, queries, keys --> TMA --> second halves of K stages -->\
//   warp 1: values                    --> TMA --> second halves of V stages --> all warps: whole stages, 16 bits
//
// In a step, K of tile j and V of tile j - 1 are converted, which consumers need together. Then the next tiles are
// loaded, as far as consumers have released stages: what they wait for has been converted, so that no warp waits for
// itself.
//
// Two warpgroups, one for K and one for V, each with a buffer for one tile of e4m3, from which it converts:
//
//   warp 0: TMA --> buffer --> all four warps: stages, 16 bits
//   warp 1 of the first: work tiles, queries
//
// The loop that converts has few instructions: straight code for a whole tile was slower than one warpgroup.
#pragma once
#include "producer.cuh"

#if KV_E4M3
namespace context_attention {

// Sixteen e4m3 become two rows of eight numbers of q's type, exactly; but for bf16 a NaN becomes 480 with its sign.
DEVICE void convert_unit(uint4 raw, uint4 (&converted)[2]) {
    constexpr auto pairs = MMA_FP16 ? e4m3_to_fp16 : e4m3_to_bf16;
    pairs(raw.x, converted[0].x, converted[0].y);
    pairs(raw.y, converted[0].z, converted[0].w);
    pairs(raw.z, converted[1].x, converted[1].y);
    pairs(raw.w, converted[1].z, converted[1].w);
}

// Converts a stage of COLUMNS in place: from boxes with rows of BOX_BYTES in its second half to spans of 64 columns.
// Eight neighbouring lanes take four units of 16 columns of two tokens that differ in bits 0 and 2, so that neither
// loads nor stores have bank conflicts. CLEAR: tokens before `low` and from `high` on become zeros: no row sees them,
// and they may be NaN, and 0 x NaN is NaN.
template <int COLUMNS, int BOX_BYTES, bool CLEAR>
DEVICE void convert_stage(uint32_t stage, int low, int high) {
    constexpr int SPANS = COLUMNS / SPAN_COLUMNS, RAW = SPANS * KV_SPAN_BYTES / 2;
    constexpr int ROUNDS = TILE_TOKENS / 32;  // of a span
    constexpr int SPANS_AT_ONCE = 4 / ROUNDS < SPANS ? 4 / ROUNDS : SPANS;
    const int lane = threadIdx.x % 32, unit = lane % 4;
    const int first = threadIdx.x % WARPGROUP / 32 * 8 + (lane / 8 ^ lane / 4 % 2 * 5);
    const uint32_t from =
        stage + RAW + first * BOX_BYTES + (unit ^ (BOX_BYTES == 128 ? first % 8 : first / 2 % 4)) * 16;
    const uint32_t to = stage + first * ROW_BYTES + (unit * 2 ^ first % 8) * 16;
#pragma unroll
    for (int base = 0; base < SPANS; base += SPANS_AT_ONCE) {
        uint4 raw[SPANS_AT_ONCE * ROUNDS];
#pragma unroll
        for (int i = 0; i < SPANS_AT_ONCE * ROUNDS; ++i) {
            const int span = base + i / ROUNDS, token = i % ROUNDS * 32;
            // The second span in a box lies 64 bytes further in a row; with the swizzle that is an exclusive or.
            const uint32_t at = BOX_BYTES == 128 ? (from ^ span % 2 * 64) + span / 2 * TILE_TOKENS * 128
                                                 : from + span * TILE_TOKENS * 64;
            raw[i] = load_shared_uint4(at + token * BOX_BYTES);
            if (CLEAR && (first + token < low || first + token >= high)) raw[i] = make_uint4(0, 0, 0, 0);
        }
        // Where raw bytes are overwritten, all warps have read them.
        if ((base + SPANS_AT_ONCE) * KV_SPAN_BYTES > RAW) named_barrier_sync<WARPGROUP>(CONVERTER_BARRIER);
#pragma unroll
        for (int i = 0; i < SPANS_AT_ONCE * ROUNDS; ++i) {
            const uint32_t at = to + (base + i / ROUNDS) * KV_SPAN_BYTES + i % ROUNDS * 32 * ROW_BYTES;
            uint4 converted[2];
            convert_unit(raw[i], converted);
            store_shared_uint4(at, converted[0]);
            store_shared_uint4(at ^ 16, converted[1]);
        }
    }
    fence_async_proxy();  // before products, and before TMA writes to the stage again
}

#if PRODUCER_WARPGROUPS == 1
template <int STAGES>
DEVICE void convert_keys(SharedStorage& shared, PipelineState<STAGES>& state) {
    wait_barrier(shared.k_loaded[state.index], state.phase);
    convert_stage<HEAD_DIM, K_BOX_BYTES, false>(shared_address(shared.k[state.index]), 0, 0);
    release(shared.k_full[state.index]);
    state.advance();
}

template <int STAGES>
DEVICE void convert_values(SharedStorage& shared, PipelineState<STAGES>& state, int low, int high) {
    wait_barrier(shared.v_loaded[state.index], state.phase);
    const uint32_t stage = shared_address(shared.v[state.index]);
    if (low <= 0 && high >= TILE_TOKENS)
        convert_stage<VALUE_DIM, V_BOX_BYTES, false>(stage, low, high);
    else
        convert_stage<VALUE_DIM, V_BOX_BYTES, true>(stage, low, high);
    release(shared.v_full[state.index]);
    state.advance();
}

#endif

DEVICE float scale_at(const void* scales, int64_t element) {
    return scales == nullptr ? 1.f : static_cast<const float*>(scales)[element];
}

// Finds the next work tile and publishes it; by warp 0.
DEVICE void publish(const Params& p, SharedStorage& shared, Schedule& schedule, int number, uint32_t phase,
                    uint64_t policy) {
    WorkTile work;
    if (!schedule.find(p, number, work)) work.request = -1;
    if (work.request >= 0) {
        const int kv_head = work.head / p.group;
        work.scale_log2 = log2_scale(p) * scale_at(p.k_scale, work.request * p.k_scale_request_stride +
                                                                  kv_head * p.k_scale_head_stride);
        work.output_scale =
            p.output_scale * scale_at(p.output_scale_device, 0) *
            scale_at(p.v_scale, work.request * p.v_scale_request_stride + kv_head * p.v_scale_head_stride);
    }
    wait_barrier(shared.q_empty, phase ^ 1);
    if (elect_one()) {
        shared.work[phase] = work;
        if (work.request >= 0 && work.last > work.first)
            load_queries(p, shared, work, policy);
        else
            mbarrier_arrive(shared_address(&shared.q_full));
    }
    __syncwarp();
}

#if PRODUCER_WARPGROUPS == 1
// A producer warp.
DEVICE void load_and_convert(const Params& p, SharedStorage& shared, int warp) {
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    static_assert(K_STAGES == V_STAGES, "warps 0 and 1 have one state of a pipeline");
    PipelineState<K_STAGES> load_state;
    paged_kv::PageWindow pages;
    KeyLoader k{&p.k_map, 0, shared.k[0][0], shared.k_loaded, shared.k_empty, load_state, pages};
    ValueLoader v{&p.v_map, p.v_table_offset, shared.v[0][0], shared.v_loaded, shared.v_empty, load_state, pages};
    PipelineState<K_STAGES> k_state;
    PipelineState<V_STAGES> v_state;
    Schedule schedule(p);
    int number = blockIdx.x;
    for (uint32_t phase = 0;; phase ^= 1) {
        if (warp == 0) {
            publish(p, shared, schedule, number, phase, policy);
        } else {
            wait_barrier(shared.q_full, phase);
            release(shared.q_empty);
        }
        // Read again where it is needed, for want of registers; warp 0 waits for the others in each step, so that it
        // stays until all have the next one.
        const WorkTile& work = shared.work[phase];
        if (work.request < 0) break;
        const int kv_head = work.head / p.group, begin = first_key(p, work);
        pages.loaded = -2;
        int next = work.first;  // to be loaded by this warp
        const auto load_until = [&](int end) {
            for (; next < min(end, work.last); ++next)
                if (warp == 0) {
                    // Taken late, so that no work tile waits here while another CTA has none.
                    if (next == max(work.first, work.last - K_STAGES) && threadIdx.x % 32 == 0)
                        number = atomic_add_relaxed(counters_of(p), 1) + gridDim.x;
                    k.load(p, work, kv_head, next, policy);
                } else if (warp == 1) {
                    v.load(p, work, kv_head, next, policy);
                }
        };
        if (warp == 0 && work.first == work.last && threadIdx.x % 32 == 0)
            number = atomic_add_relaxed(counters_of(p), 1) + gridDim.x;
        if (work.first < work.last) {
            load_until(work.first + (warp == 0 ? K_STAGES : V_STAGES - 1));
#pragma unroll 1
            for (int tile = work.first; tile <= work.last; ++tile) {
                if (tile < work.last) convert_keys(shared, k_state);
                const int values = (tile - 1) * TILE_TOKENS;
                if (tile > work.first) convert_values(shared, v_state, begin - values, work.kv_len - values);
                load_until(tile + (warp == 0 ? K_STAGES : V_STAGES - 1));
            }
        }
        if (warp == 0) number = __shfl_sync(~0u, number, 0);
    }
    if (warp == 0 && threadIdx.x % 32 == 0) leave(p);
}

#else
// Converts a tile of COLUMNS from boxes with rows of BOX_BYTES to a stage; lanes and CLEAR are as in convert_stage.
template <int COLUMNS, int BOX_BYTES, bool CLEAR>
DEVICE void convert_tile(uint32_t stage, uint32_t raw_tile, int low, int high) {
    constexpr int ROUNDS = TILE_TOKENS / 32, UNITS = COLUMNS / SPAN_COLUMNS * ROUNDS;
    constexpr int AT_ONCE = HEAD_DIM == 128 ? 4 : 2;
    static_assert(BOX_BYTES == 128 && UNITS % AT_ONCE == 0, "two spans lie in a box");
    const int lane = threadIdx.x % 32, unit = lane % 4;
    int token = threadIdx.x % WARPGROUP / 32 * 8 + (lane / 8 ^ lane / 4 % 2 * 5);
    uint32_t from = raw_tile + token * BOX_BYTES + (unit ^ token % 8) * 16;
    uint32_t to = stage + token * ROW_BYTES + (unit * 2 ^ token % 8) * 16;
    uint4 raw = load_shared_uint4(from);
#pragma unroll AT_ONCE
    for (int i = 1; i <= UNITS; ++i) {
        uint4 own = raw;
        if (CLEAR && (token < low || token >= high)) own = make_uint4(0, 0, 0, 0);
        if (i < UNITS) {
            token += 32;
            from += 32 * BOX_BYTES;
            if (i % ROUNDS == 0) {  // the next span, which is the other half of the box or in the next one
                token -= TILE_TOKENS;
                from = (from - TILE_TOKENS * BOX_BYTES) ^ 64;
                if (i % (2 * ROUNDS) == 0) from += TILE_TOKENS * BOX_BYTES;
            }
            raw = load_shared_uint4(from);
        }
        uint4 converted[2];
        convert_unit(own, converted);
        store_shared_uint4(to, converted[0]);
        store_shared_uint4(to ^ 16, converted[1]);
        to += 32 * ROW_BYTES;  // spans follow each other
    }
    fence_async_proxy();  // before products
}

// A warp's part of the pipeline of keys or of values: converts the tiles of a work tile; a warp that LOADS has loaded
// them before. `convert` gets a stage, the buffer and the tile's number.
template <bool LOADS, int COLUMNS, int STAGES, class Loader, class Convert>
DEVICE void load_and_convert(const Params& p, const WorkTile& work, Loader& loader, uint8_t* stages, uint64_t* full,
                             uint64_t* empty, PipelineState<1>& loaded, PipelineState<STAGES>& state, uint64_t policy,
                             Convert convert) {
    loader.pages.loaded = -2;
#pragma unroll 1
    for (int tile = work.first; tile < work.last; ++tile) {
        if constexpr (LOADS) loader.load(p, work, work.head / p.group, tile, policy);
        wait_barrier(empty[state.index], state.phase ^ 1);
        wait_barrier(*loader.full, loaded.phase);
        convert(shared_address(stages + state.index * COLUMNS * TILE_TOKENS * 2), shared_address(loader.stages), tile);
        release(full[state.index]);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(loader.empty));
        loaded.advance();
        state.advance();
    }
}

// A warp of the producer warpgroup of keys; one of them `finds` work tiles.
template <bool LOADS>
DEVICE void convert_keys(const Params& p, SharedStorage& shared, bool finds) {
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    KeyLoader k{&p.k_map, 0, shared.raw_k, shared.k_loaded, &shared.k_read};
    PipelineState<1> loaded;
    PipelineState<K_STAGES> state;
    Schedule schedule(p);
    int number = blockIdx.x;
    for (uint32_t phase = 0;; phase ^= 1) {
        if (!LOADS && finds) {
            publish(p, shared, schedule, number, phase, policy);
        } else {
            wait_barrier(shared.q_full, phase);
            release(shared.q_empty);
        }
        // Read again where it is needed, for want of registers: no warp publishes the work tile after the next before
        // all have begun the next one.
        const WorkTile& work = shared.work[phase];
        if (work.request < 0) break;
        // Taken late, so that no work tile waits here while another CTA has none.
        const auto take_number = [&] {
            if (!LOADS && finds && threadIdx.x % 32 == 0) number = atomic_add_relaxed(counters_of(p), 1) + gridDim.x;
        };
        if (work.first == work.last) take_number();
        load_and_convert<LOADS, HEAD_DIM>(p, work, k, shared.k[0][0], shared.k_full, shared.k_empty, loaded, state,
                                          policy, [&](uint32_t stage, uint32_t raw, int tile) {
                                              if (tile == max(work.first, work.last - K_STAGES)) take_number();
                                              convert_tile<HEAD_DIM, K_BOX_BYTES, false>(stage, raw, 0, 0);
                                          });
        if (!LOADS && finds) number = __shfl_sync(~0u, number, 0);
    }
    if (!LOADS && finds && threadIdx.x % 32 == 0) leave(p);
}

// A warp of the producer warpgroup of values.
template <bool LOADS>
DEVICE void convert_values(const Params& p, SharedStorage& shared) {
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    ValueLoader v{&p.v_map, p.v_table_offset, shared.raw_v, shared.v_loaded, &shared.v_read};
    PipelineState<1> loaded;
    PipelineState<V_STAGES> state;
    for (uint32_t phase = 0;; phase ^= 1) {
        wait_barrier(shared.q_full, phase);
        release(shared.q_empty);
        const WorkTile& work = shared.work[phase];
        if (work.request < 0) break;
        load_and_convert<LOADS, VALUE_DIM>(p, work, v, shared.v[0][0], shared.v_full, shared.v_empty, loaded, state,
                                           policy, [&](uint32_t stage, uint32_t raw, int tile) {
                                               const int low = first_key(p, work) - tile * TILE_TOKENS,
                                                         high = work.kv_len - tile * TILE_TOKENS;
                                               if (low <= 0 && high >= TILE_TOKENS)
                                                   convert_tile<VALUE_DIM, V_BOX_BYTES, false>(stage, raw, low, high);
                                               else
                                                   convert_tile<VALUE_DIM, V_BOX_BYTES, true>(stage, raw, low, high);
                                           });
    }
}
#endif

}  // namespace context_attention
#endif
