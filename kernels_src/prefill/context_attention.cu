// Context attention (prefill): the query tokens of each request over its keys, paged or ragged. bf16 or fp16 in and
// out, fp32 accumulation.
//
//   lengths --> producer warps: the next work tile (a row tile of a head pack of a request), longest first
//   queries, keys, values --> TMA --> shared memory: ROWS queries; K_STAGES tiles of 128 keys, V_STAGES of values
//
//   consumer warpgroups, 64 rows each:
//     S(0) = Q K(0)^T, P(0) = softmax
//     for each further tile j:  S(j) = Q K(j)^T and O += P(j-1) V(j-1) in flight, softmax of S(j) meanwhile
//     O += P V of the last tile; rows of O --> shared memory --> output
//
// The warpgroups issue their products in turn (named barriers TURN), so that one's softmax overlaps with another's
// products. Rows of a row tile are tokens x `1 << packed_log2` neighbouring heads of one KV head, so that short
// requests fill it. Key tiles are walked from the first to the last at absolute multiples of 128 keys, and a tile that
// a row does not see leaves its numbers as they are: a row's bits depend neither on how a prompt is cut into chunks nor
// on other requests. With SEGMENTS they are those that decode gives as well (common/segments.cuh).
//
// Build: -DHEAD_DIM=n -DVALUE_DIM=n -DMMA_FP16=0|1 -DTILE_TOKENS=64|128 -DWARPGROUPS=n -DK_STAGES=n -DV_STAGES=n
//        -DSOFT_CAP=0|1 -DSEGMENTS=0|1 -DQUERY_REGISTER_STEPS=n of the HEAD_DIM / 16
//        -DL2_POLICY=word (an L2Policy) -DKERNEL_NAME=symbol
//        -DKV_E4M3=0|1 of keys and values, which have the type of queries otherwise; 1 with WARPGROUPS=2 and
//        -DPRODUCER_WARPGROUPS=1|2 (default: 1)
//        -DSPLIT_KEYS=0|1 (default: 0) for few row tiles over many keys: each is computed by gridDim.y CTAs, which have
//        a part of its keys each, and merge_parts.cu merges their outputs
#include "epilogue.cuh"
#include "conversion.cuh"

namespace context_attention {

// A warpgroup's queries as the left operand of its products: the first columns in registers, as far as there are
// enough, the others in shared memory, whose bandwidth is what products lack most.
struct Queries {
    uint32_t first[QUERY_REGISTER_STEPS > 0 ? QUERY_REGISTER_STEPS : 1][4];
    uint64_t operand;

    DEVICE explicit Queries(const uint8_t (&shared)[K_SPANS][Q_SPAN_BYTES])
        : operand(k_major_descriptor(shared_address(shared))) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < QUERY_REGISTER_STEPS; ++step) {
            const int piece = step % 4 * 2 + lane / 16;
            ldmatrix_x4(first[step], shared_address(shared[step / 4]) + row * ROW_BYTES + (piece ^ row % 8) * 16);
        }
    }

    template <bool ADD>
    DEVICE void multiply(int step, uint64_t keys, Scores& s) const {
        if (step < QUERY_REGISTER_STEPS)
            wgmma<MMA_FP16, false, ADD>(s, first[step], keys);
        else
            wgmma_keys<MMA_FP16, ADD>(s, advance_descriptor(operand, step / 4 * Q_SPAN_BYTES + step % 4 * 32), keys);
    }
};

// S = Q K^T of a tile; in flight on return.
DEVICE void multiply_keys(const Queries& q, uint64_t k, Scores& s) {
    fence_registers(s);
    wgmma_fence();
    q.multiply<false>(0, k, s);
#pragma unroll
    for (int step = 1; step < HEAD_DIM / 16; ++step)
        q.multiply<true>(step, advance_descriptor(k, step / 4 * KV_SPAN_BYTES + step % 4 * 32), s);
    wgmma_commit();
}

// O += P V of a tile (O = P V if not ADD); in flight on return.
template <bool ADD = true>
DEVICE void multiply_values(const Probabilities& probability, uint64_t v, Output& out) {
    fence_registers(out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        if constexpr (VALUE_DIM == 256) {
            wgmma<MMA_FP16, true, true, 0, 128>(out, probability[step], advance_descriptor(v, step * 16 * ROW_BYTES));
            wgmma<MMA_FP16, true, true, 128, 128>(out, probability[step],
                                                  advance_descriptor(v, 2 * KV_SPAN_BYTES + step * 16 * ROW_BYTES));
        } else {
            const uint64_t at = advance_descriptor(v, step * 16 * ROW_BYTES);
            if (step == 0)
                wgmma<MMA_FP16, true, ADD>(out, probability[step], at);
            else
                wgmma<MMA_FP16, true>(out, probability[step], at);
        }
    wgmma_commit();
}

// Values that no row of the request sees (before `first` and from `end` on) may be NaN, and 0 x NaN is NaN: they become
// zero. Every warpgroup clears all of them, so that none waits for another.
DEVICE void clear_unseen_values(SharedStorage& shared, int first, int end, int stage, int tile, int warpgroup) {
    if constexpr (KV_E4M3) return;  // the converter warps did
    const int begin = first - tile * TILE_TOKENS;
    end -= tile * TILE_TOKENS;
    if (begin <= 0 && end >= TILE_TOKENS) return;
    constexpr int PIECES = ROW_BYTES / 16;
    for (int i = threadIdx.x % WARPGROUP; i < TILE_TOKENS * PIECES; i += WARPGROUP) {
        const int row = i / PIECES;
        if (row < begin || row >= end)
#pragma unroll
            for (int span = 0; span < V_SPANS; ++span)
                *reinterpret_cast<uint4*>(&shared.v[stage][span][i * 16]) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    named_barrier_sync<WARPGROUP>(WARPGROUP_BARRIER + warpgroup);
}

// A warpgroup's rows of a work tile that sees keys.
DEVICE void compute(const Params& p, SharedStorage& shared, const WorkTile& work, int warpgroup, const Scale& scale,
                    PipelineState<K_STAGES>& k, PipelineState<V_STAGES>& v, Rows& rows, Output& out) {
    const Queries q(shared.q[warpgroup]);
    const auto keys = [&](int i) { return k_major_descriptor(shared_address(shared.k[i])); };
    const auto values = [&](int i) { return mn_major_descriptor(shared_address(shared.v[i]), KV_SPAN_BYTES); };
    // Tiles within these keys need no mask for any row of the warpgroup.
    const int token = work.token + (warpgroup * WARPGROUP_ROWS >> p.packed_log2);
    const int last_token = work.token + ((warpgroup * WARPGROUP_ROWS + WARPGROUP_ROWS - 1) >> p.packed_log2);
    const int2 all_see =
        make_int2(first_visible(p, position_of(work, last_token)), visible_end(p, work, position_of(work, token)));
    const int first = first_key(p, work);
    Scores s;
    Probabilities probability;
    float factor[2];
    Folded folded(shared);
    bool segment_ended = false;  // with the tile before the latest one; its output is not folded yet
    wait_barrier(shared.k_full[k.index], k.phase);
    multiply_keys(q, keys(k.index), s);
    wgmma_wait<0>();
    fence_registers(s);
    release(shared.k_empty[k.index]);
    k.advance();
    adjust(s, scale);
    mask(s, rows, work.first, all_see);
    exponentiate(s, scale, rows, factor);
    pack(s, probability);
#pragma unroll 1
    for (int tile = work.first + 1; tile < work.last; ++tile) {
        wait_barrier(shared.k_full[k.index], k.phase);
        named_barrier_sync<2 * WARPGROUP>(TURN + warpgroup);
        multiply_keys(q, keys(k.index), s);
        if (segment_ended) {  // folded while the scores are in flight
            named_barrier_arrive<2 * WARPGROUP>(TURN + (warpgroup + 1) % WARPGROUPS);
            folded.store(out);
            wait_barrier(shared.v_full[v.index], v.phase);
            clear_unseen_values(shared, first, work.kv_len, v.index, tile - 1, warpgroup);
            multiply_values<false>(probability, values(v.index), out);
        } else {
            wait_barrier(shared.v_full[v.index], v.phase);
            clear_unseen_values(shared, first, work.kv_len, v.index, tile - 1, warpgroup);
            multiply_values(probability, values(v.index), out);
            named_barrier_arrive<2 * WARPGROUP>(TURN + (warpgroup + 1) % WARPGROUPS);
        }
        wgmma_wait<1>();
        fence_registers(s);
        release(shared.k_empty[k.index]);
        k.advance();
        adjust(s, scale);
        mask(s, rows, tile, all_see);
        segment_ended = SEGMENTS && tile % SEGMENT_TILES == 0;
        if (segment_ended) folded.close(rows, scale.log2);
        exponentiate(s, scale, rows, factor);
        wgmma_wait<0>();
        fence_registers(out);
        release(shared.v_empty[v.index]);
        v.advance();
        pack(s, probability);
        // Mostly no maximum rises; a factor of 1 changes nothing.
        if (!segment_ended && __any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f))
#pragma unroll
            for (int i = 0; i < VALUE_DIM / 2; ++i) out[i] *= factor[i / 2 % 2];
    }
    release(shared.q_empty);
    wait_barrier(shared.v_full[v.index], v.phase);
    clear_unseen_values(shared, first, work.kv_len, v.index, work.last - 1, warpgroup);
    if (segment_ended) {
        folded.store(out);
        multiply_values<false>(probability, values(v.index), out);
    } else {
        multiply_values(probability, values(v.index), out);
    }
    wgmma_wait<0>();
    fence_registers(out);
    release(shared.v_empty[v.index]);
    v.advance();
    if constexpr (SEGMENTS) folded.finish(scale.log2, rows, out);
}

DEVICE void consume(const Params& p, SharedStorage& shared, int warpgroup) {
    [[maybe_unused]] const Scale launch_scale = KV_E4M3 ? Scale{} : scale_of(p, log2_scale(p));
    PipelineState<K_STAGES> k;
    PipelineState<V_STAGES> v;
    if (warpgroup == 0) named_barrier_arrive<2 * WARPGROUP>(TURN);  // the first turn
    for (uint32_t phase = 0;; phase ^= 1) {
        wait_barrier(shared.q_full, phase);
        const WorkTile work = shared.work[phase];
        if (work.request < 0) break;
#if KV_E4M3
        const Scale scale = scale_of(p, work.scale_log2);
#else
        const Scale& scale = launch_scale;
#endif
        const int warp_row = threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
        Rows rows;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int position = position_of(work, work.token + ((row + 8 * i) >> p.packed_log2));
            rows.begin[i] = first_visible(p, position);
            rows.end[i] = visible_end(p, work, position);
            rows.maximum[i] = -INFINITY;
            rows.sum[i] = 0.f;
        }
        Output out;
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; ++i) out[i] = 0.f;
        if (work.last > work.first)
            compute(p, shared, work, warpgroup, scale, k, v, rows, out);
        else
            release(shared.q_empty);
        finish_rows(p, work, row, scale.log2, rows, out);
        store_rows(p, shared, work, warp_row, out);
    }
}

}  // namespace context_attention

extern "C" __global__ void __launch_bounds__(context_attention::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ context_attention::Params p) {
    using namespace context_attention;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&shared.q_full), 1);
        mbarrier_init(shared_address(&shared.q_empty), CONSUMER_WARPS + OTHER_PRODUCERS);
        for (int i = 0; i < K_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.k_full[i]), FILLING_WARPS);
            mbarrier_init(shared_address(&shared.k_empty[i]), CONSUMER_WARPS);
        }
        for (int i = 0; i < V_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.v_full[i]), FILLING_WARPS);
            mbarrier_init(shared_address(&shared.v_empty[i]), CONSUMER_WARPS);
        }
#if KV_E4M3
        for (int i = 0; i < K_STAGES; ++i) mbarrier_init(shared_address(&shared.k_loaded[i]), 1);
        for (int i = 0; i < V_STAGES; ++i) mbarrier_init(shared_address(&shared.v_loaded[i]), 1);
#endif
#if PRODUCER_WARPGROUPS == 2
        mbarrier_init(shared_address(&shared.k_read), FILLING_WARPS);
        mbarrier_init(shared_address(&shared.v_read), FILLING_WARPS);
#endif
        fence_mbarrier_init();
        prefetch_tensor_map(&p.q_map);
        prefetch_tensor_map(&p.k_map);
        prefetch_tensor_map(&p.v_map);
    }
    wait_for_previous_grid();
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
#if PRODUCER_WARPGROUPS == 2
    if (warpgroup >= WARPGROUPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, threadIdx.x % WARPGROUP / 32, 0);
        if (warpgroup == WARPGROUPS) {
            if (warp == 0)
                convert_keys<true>(p, shared, false);
            else
                convert_keys<false>(p, shared, warp == 1);
        } else {
            if (warp == 2) allow_next_grid();
            if (warp == 3 && blockIdx.x == 0) report_clamped(p, threadIdx.x % 32, 32);
            if (warp == 0)
                convert_values<true>(p, shared);
            else
                convert_values<false>(p, shared);
        }
        return;
    }
#endif
    if (warpgroup == WARPGROUPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, threadIdx.x % WARPGROUP / 32, 0);
#if KV_E4M3
        if (warp == 2) allow_next_grid();
        if (warp == 3 && blockIdx.x == 0) report_clamped(p, threadIdx.x % 32, 32);
#if PRODUCER_WARPGROUPS == 1
        load_and_convert(p, shared, warp);
#endif
#else
        if (warp == 0) {
            load_keys(p, shared);
        } else if (warp == 1) {
            load_values(p, shared);
        } else if (warp == 2) {
            allow_next_grid();
            if (blockIdx.x == 0) report_clamped(p, threadIdx.x % 32, 32);
        }
#endif
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(p, shared, warpgroup);
    }
}
