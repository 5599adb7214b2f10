// Paged MLA (multi-head latent attention) decode: queries of LATENT + ROPE columns, keys of as many columns in a paged
// latent cache, values are the first LATENT columns of the keys. bf16 in, fp32 accumulation.
//
//   page table --> TMA --> 2 stages of 64 keys, each a box for 64 columns
//   queries    -->         64 rows (tokens x heads), once per work tile
//   by 4 producer warps
//
//   consumer warpgroup 0                       consumer warpgroup 1
//     S0 = Q K0^T, P0 = softmax                  S1 = Q K1^T
//     P0 and row maxima --> shared memory -->    P1 = softmax, starting from those maxima
//     O left += P0 V0 left                       O right += P0 V0 right
//     O left += P1 V1 left    <-- shared memory <-- P1 and row maxima
//                                                O right += P1 V1 right
//
// Each warpgroup has 64 x LATENT / 2 of O in registers, and the scores of every other tile for all 64 rows. The rope
// columns of the queries are in registers too. The maxima pass from tile to tile through both warpgroups in turn; a
// maximum is raised only when a score exceeds it by more than 2^8, so that O is rarely rescaled.
//
// Shared memory bounds the time of a tile: Q K^T reads 128 bytes per cycle. Products mostly wait for the next tile to
// arrive, so each quarter of a stage is loaded again as soon as its values are multiplied. Control flow is uniform in
// each warp except for single lanes, and the compiler must recognise that: operands of products and copies are then in
// uniform registers; moving them there would take longer than a product.
//
// The grid is persistent and follows from bounds alone. CTAs work in groups of `cta_group_size`, each CTA on its own
// row tile of a request, so that the second read of a key hits L2. The KV tiles of all (request, group of row tiles)
// form the stream-K tile space, which is cut evenly among the CTA groups. With `splits` > 0 output tiles are cut into
// equal splits by their own length alone (see split_count), and a CTA group computes the splits that begin in its
// range. Partials are merged from the last split to the first, once a CTA has computed its work tiles, by all CTAs that
// have splits of the output tile and are at that point. No CTA needs another one to run.
//
// Build: -DLATENT=512|256|128 -DROPE=64|32|0 -DKV_E4M3=0 -DROWS=64 -DTILE_TOKENS=64 -DBOX_COLUMNS=64
//        -DKERNEL_NAME=symbol

#include "bf16/producer.cuh"
#include "bf16/epilogue.cuh"
#include "softmax.cuh"

namespace paged_mla_decode {

constexpr int P0_READY = 2;
constexpr int P1_READY = 3;
constexpr int WARPGROUP_BARRIER = 4;  // and 5

using Output = float[HALF_COLUMNS / 2];

// The box that is multiplied i-th in stage B: the rope columns, then the quarters in the order in which they become
// free.
template <int B>
DEVICE constexpr int box_of(int i) {
    if (i < ROPE_BOXES) return ROPE_BOX;
    const int other = i - ROPE_BOXES;
    return quarter_of(B, other / QUARTER_BOXES) * QUARTER_BOXES + other % QUARTER_BOXES;
}

// Products of 16 columns in a box.
DEVICE constexpr int steps_of(int box) {
    constexpr int MOST = BOX_COLUMNS / 16;
    const int left = (COLUMNS - box * BOX_COLUMNS) / 16;
    return left < 0 ? 0 : (left < MOST ? left : MOST);
}

using RopeQueries = uint32_t[BOX_COLUMNS / 16][4];

DEVICE void load_rope_queries(SharedStorage& shared, RopeQueries& q) {
#pragma unroll
    for (int step = 0; step < steps_of(ROPE_BOX); ++step)
        ldmatrix_x4(q[step], fragment_address(shared_address(shared.q[ROPE_BOX]), step));
}

// S = Q K^T of the tile in stage B.
template <int B>
DEVICE void multiply_keys(SharedStorage& shared, const RopeQueries& rope, uint32_t phase, Scores& s) {
    const uint64_t q = k_major_descriptor(shared_address(shared.q[0]));
    const uint64_t k = k_major_descriptor(shared_address(shared.kv[B][0]));
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        const int box = box_of<B>(i);
        wait_barrier(shared.full[B][box], phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BOX_COLUMNS / 16; ++step) {
            if (step >= steps_of(box)) break;
            const uint32_t offset = box * BOX_BYTES + step * 32;
            if (box == ROPE_BOX && i + step > 0)
                wgmma<false, false>(s, rope[step], advance_descriptor(k, offset));
            else if (box == ROPE_BOX)
                wgmma<false, false, false>(s, rope[step], advance_descriptor(k, offset));
            else
                wgmma_64x64<false>(s, advance_descriptor(q, offset), advance_descriptor(k, offset), i + step > 0);
        }
    }
    wgmma_commit();
}

// Tokens past the length may hold NaN, and 0 x NaN is NaN: they become zero before anyone multiplies with them.
DEVICE void clear_rows(SharedStorage& shared, int b, int valid) {
    const int chunk = threadIdx.x % WARPGROUP;
    for (int i = chunk; i < (TILE_TOKENS - valid) * 8 * VALUE_BOXES; i += WARPGROUP) {
        const int row = valid + i / (8 * VALUE_BOXES), column = i % (8 * VALUE_BOXES);
        *reinterpret_cast<uint4*>(&shared.kv[b][column / 8][row * 128 + column % 8 * 16]) = make_uint4(0, 0, 0, 0);
    }
}

// The address of P of stage B's tile. P0 overwrites the queries' rope columns, which are in registers.
template <int B>
DEVICE uint32_t p_address(SharedStorage& shared) {
    return shared_address(B == 0 ? shared.q[ROPE_BOX] : shared.p1);
}

// P = 2^(scaled S - maximum) of keys 16 STEP on, as the A operand of P V; adds it to `sum`.
template <int STEP>
DEVICE void exponentiate(Scores& s, float scale, const Rows& rows, Probabilities& probability, float (&sum)[4]) {
#pragma unroll
    for (int i = STEP * 8; i < STEP * 8 + 8; ++i) {
        s[i] = exp2_approximate(fmaf(s[i], scale, -rows.maximum[i / 2 % 2]));
        sum[i % 4] += s[i];
        if (i % 2 == 1) probability[STEP][i / 2 % 4] = pack_bf16(s[i - 1], s[i]);
    }
}

// Raises the maxima of rows whose scores exceed them by too much, publishes them to the other warpgroup, and returns
// the factors of earlier sums. Lanes only compare with each other if one exceeds.
template <int WG>
DEVICE void raise_maxima(SharedStorage& shared, int row, const Scores& s, float scale, Rows& rows, float (&factor)[2]) {
    float top[2];
    own_maxima(s, top);
    bool over = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        top[i] *= scale;
        over |= top[i] > rows.maximum[i] + MAXIMUM_SLACK;
        factor[i] = 1.f;
    }
    const bool raised = __any_sync(~0u, over);
    if (raised) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int step = 1; step < 4; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
            const float maximum = next_maximum(rows.maximum[i], top[i]);
            factor[i] = exp2_approximate(rows.maximum[i] - maximum);
            rows.maximum[i] = maximum;
            rows.sum[i] *= factor[i];
            if (threadIdx.x % 4 == 0) shared.maximum[WG][row + 8 * i] = maximum;
        }
    }
    if (threadIdx.x % 32 == 0) shared.raised[WG][threadIdx.x % WARPGROUP / 32] = raised;
}

// Publishes P (and cleared rows) of stage WG to the other warpgroup.
template <int WG>
DEVICE void publish_probabilities(SharedStorage& shared, const Probabilities& probability, int valid) {
    if (valid < TILE_TOKENS) named_barrier_sync<WARPGROUP>(WARPGROUP_BARRIER + WG);  // no warp reads the keys any more
    if (valid < TILE_TOKENS) clear_rows(shared, WG, valid);
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        stmatrix_x4(fragment_address(p_address<WG>(shared), step), probability[step]);
    fence_async_proxy();
    named_barrier_arrive<CONSUMERS>(WG == 0 ? P0_READY : P1_READY);
    if (valid < TILE_TOKENS) named_barrier_sync<WARPGROUP>(WARPGROUP_BARRIER + WG);
}

DEVICE void rescale(Output& out, const float (&factor)[2]) {
    if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < HALF_COLUMNS / 2; ++i) out[i] *= factor[i / 2 % 2];
}

// Arrives at empty barrier `which` of stage `b` for the warp.
DEVICE void release(SharedStorage& shared, int b, int which) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[b][which]));
}

template <int WG>
DEVICE uint64_t values(SharedStorage& shared, int b, int half) {
    return mn_major_descriptor(shared_address(shared.kv[b][WG * HALF_BOXES + half * QUARTER_BOXES]), BOX_BYTES);
}

// O += P V of stage WG with P in this warpgroup's registers; both quarters are in flight on return.
template <int WG>
DEVICE void multiply_own_values(SharedStorage& shared, const Probabilities& probability, Output& out) {
    fence_registers(out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma<false, true, true, 0, QUARTER_COLUMNS>(out, probability[step],
                                                     advance_descriptor(values<WG>(shared, WG, 0), step * 16 * 128));
    wgmma_commit();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma<false, true, true, QUARTER_COLUMNS, QUARTER_COLUMNS>(
            out, probability[step], advance_descriptor(values<WG>(shared, WG, 1), step * 16 * 128));
    wgmma_commit();
}

// The same for the other warpgroup's stage and P in shared memory, one product at a time.
struct PeerValues {
    static constexpr int PRODUCTS = 2 * TILE_TOKENS / 16;
    uint64_t p, v[2];

    template <int WG>
    DEVICE void begin(SharedStorage& shared, Output& out) {
        p = k_major_descriptor(p_address<1 - WG>(shared));
        for (int i = 0; i < 2; ++i) v[i] = values<WG>(shared, 1 - WG, i);
        fence_registers(out);
        wgmma_fence();
    }
    template <int I>
    DEVICE void multiply(Output& out) {
        wgmma_fence();
        constexpr int HALF = I / 4, STEP = I % 4;
        wgmma_add<false, HALF * QUARTER_COLUMNS, QUARTER_COLUMNS>(out, advance_descriptor(p, STEP * 32),
                                                                  advance_descriptor(v[HALF], STEP * 16 * 128));
        if (STEP == 3) wgmma_commit();
    }
    DEVICE void multiply_all(Output& out) {
        multiply<0>(out), multiply<1>(out), multiply<2>(out), multiply<3>(out);
        multiply<4>(out), multiply<5>(out), multiply<6>(out), multiply<7>(out);
    }
};

// Releases each quarter of stage `b` when its product, of the two latest, is done.
template <int WG>
DEVICE void release_values(SharedStorage& shared, int b, Output& out) {
    wgmma_wait<1>();
    release(shared, b, WG * 2);
    wgmma_wait<0>();
    fence_registers(out);
    release(shared, b, WG * 2 + 1);
}

// This warp does not need the work tile's queries any more.
DEVICE void release_queries(SharedStorage& shared) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.q_empty));
}

// After the other warpgroup has published P: takes over the maxima that it raised.
template <int WG>
DEVICE void adopt_maxima(SharedStorage& shared, int row, Rows& rows, Output& out) {
    if (!__any_sync(~0u, shared.raised[1 - WG][threadIdx.x % WARPGROUP / 32])) return;
    float factor[2];
    for (int i = 0; i < 2; ++i) {
        const float maximum = shared.maximum[1 - WG][row + 8 * i];
        factor[i] = exp2_approximate(rows.maximum[i] - maximum);
        rows.maximum[i] = maximum;
        rows.sum[i] *= factor[i];
    }
    rescale(out, factor);
}

// Warpgroup 0: scores of the even tiles.
DEVICE void compute_even_tiles(SharedStorage& shared, const WorkTile& work, const RopeQueries& rope, int row,
                               float scale_log2, uint32_t& full, Rows& rows, Output& out) {
    const int last = work.first + work.key_tiles();
    const float scale = fabsf(scale_log2);
#pragma unroll 1
    for (int tile = work.first; tile < last; tile += 2) {
        Scores s;
        Probabilities probability;
        float factor[2];
        multiply_keys<0>(shared, rope, full, s);
        full ^= 1;
        wgmma_wait<0>();
        fence_registers(s);
        if (ROPE_BOXES > 0) release(shared, 0, QUARTERS);
        mask_scores(work, tile, rows, scale_log2 < 0.f, s);
        raise_maxima<0>(shared, row, s, scale, rows, factor);
        float sum[4] = {};
        exponentiate<0>(s, scale, rows, probability, sum);
        exponentiate<1>(s, scale, rows, probability, sum);
        exponentiate<2>(s, scale, rows, probability, sum);
        exponentiate<3>(s, scale, rows, probability, sum);
        rows.sum[0] += sum[0] + sum[1], rows.sum[1] += sum[2] + sum[3];
        publish_probabilities<0>(shared, probability, work.valid(tile));
        rescale(out, factor);
        multiply_own_values<0>(shared, probability, out);
        release_values<0>(shared, 0, out);
        if (tile + 1 >= last) break;
        named_barrier_sync<CONSUMERS>(P1_READY);
        adopt_maxima<0>(shared, row, rows, out);
        PeerValues other;
        other.begin<0>(shared, out);
        other.multiply_all(out);
        release_values<0>(shared, 1, out);
    }
}

// Warpgroup 1: scores of the odd tiles. The even tile's P V overlaps with their softmax: a warp that issues a product
// waits until earlier ones have started, so the products are issued between parts of the softmax.
DEVICE void compute_odd_tiles(SharedStorage& shared, const WorkTile& work, const RopeQueries& rope, int row,
                              float scale_log2, uint32_t& full, Rows& rows, Output& out) {
    const int last = work.first + work.key_tiles();
    const float scale = fabsf(scale_log2);
    int tile = work.first;
#pragma unroll 1
    for (; tile + 1 < last; tile += 2) {
        Scores s;
        Probabilities probability;
        PeerValues other;
        float factor[2];
        wgmma_wait<0>();
        fence_registers(out);
        multiply_keys<1>(shared, rope, full, s);
        full ^= 1;
        named_barrier_sync<CONSUMERS>(P0_READY);
        adopt_maxima<1>(shared, row, rows, out);
        other.begin<1>(shared, out);
        other.multiply<0>(out), other.multiply<1>(out);
        wgmma_commit();
        wgmma_wait<1>();
        fence_registers(s);
        if (ROPE_BOXES > 0) release(shared, 1, QUARTERS);
        mask_scores(work, tile + 1, rows, scale_log2 < 0.f, s);
        raise_maxima<1>(shared, row, s, scale, rows, factor);
        float sum[4] = {};
        other.multiply<2>(out);
        exponentiate<0>(s, scale, rows, probability, sum);
        other.multiply<3>(out);
        exponentiate<1>(s, scale, rows, probability, sum);
        other.multiply<4>(out);
        exponentiate<2>(s, scale, rows, probability, sum);
        other.multiply<5>(out);
        exponentiate<3>(s, scale, rows, probability, sum);
        rows.sum[0] += sum[0] + sum[1], rows.sum[1] += sum[2] + sum[3];
        publish_probabilities<1>(shared, probability, work.valid(tile + 1));
        other.multiply<6>(out), other.multiply<7>(out);
        release_values<1>(shared, 0, out);
        rescale(out, factor);
        multiply_own_values<1>(shared, probability, out);
        release_values<1>(shared, 1, out);
    }
    if (tile >= last) return;
    named_barrier_sync<CONSUMERS>(P0_READY);
    adopt_maxima<1>(shared, row, rows, out);
    PeerValues other;
    other.begin<1>(shared, out);
    other.multiply_all(out);
    release_values<1>(shared, 0, out);
}

// The warp's staging buffer for rows of the output.
DEVICE uint32_t staging_address(SharedStorage& shared) {
    return shared_address(shared.p1) + threadIdx.x / 32 * (BOX_BYTES / (CONSUMERS / 32));
}

// Producer warps publish the work tile, because re-reading the lengths would miss the cache.
DEVICE bool next_work_tile(SharedStorage& shared, uint32_t q_full, WorkTile& work) {
    wait_barrier(shared.q_full, q_full);
    work = shared.work[q_full];
    return work.splits.count > 0;
}

// Returns whether there were partials.
DEVICE bool consume(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const float scale = softmax_scale_log2(p);
    const float scale_log2 = scale == 0.f ? 1e-30f : scale;  // 0 x -inf is NaN
    uint32_t full = 0, q_full = 0;  // phases
    // Counter of the latest partial; its arrival is published with the next one, when the stores had time. -1:
    // published; -2: no partial so far.
    int written = -2;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    for (bool any = work_tiles.next(work); any; any = next_work_tile(shared, q_full, work)) {
        const int thread = reread_thread_index();
        const int warpgroup = __shfl_sync(~0u, thread / WARPGROUP, 0);
        const int row = thread % WARPGROUP / 32 * 16 + thread % 32 / 4;  // the first of the thread's two
        Rows rows;
        for (int i = 0; i < 2; ++i) {
            rows.visible[i] = visible_drafts(p, work, row + 8 * i);
            rows.maximum[i] = LOWEST;
            rows.sum[i] = 0.f;
        }
        Output out;
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) out[i] = 0.f;
        wait_barrier(shared.q_full, q_full);
        q_full ^= 1;
        RopeQueries rope;
        load_rope_queries(shared, rope);
        // P overwrites the rope queries; and the previous work tile's sums have been read.
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        if (warpgroup == 0)
            compute_even_tiles(shared, work, rope, row, scale_log2, full, rows, out);
        else
            compute_odd_tiles(shared, work, rope, row, scale_log2, full, rows, out);
        release_queries(shared);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int step = 1; step < 4; step *= 2) rows.sum[i] += __shfl_xor_sync(~0u, rows.sum[i], step);
            if (threadIdx.x % 4 == 0) shared.sum[warpgroup][row + 8 * i] = rows.sum[i];
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        for (int i = 0; i < 2; ++i) rows.sum[i] = shared.sum[0][row + 8 * i] + shared.sum[1][row + 8 * i];
        const int column = warpgroup * HALF_COLUMNS;
        bool finished = work.whole();
        if (!finished) {
            const RowScales row_scales(out);
            finished = work.splits.counter < 0 && work.splits.index == work.splits.count - 1;
            if (finished) {
                fold_splits(p, work, row, column, out, row_scales, rows.maximum, rows.sum);
            } else {
                if (written >= 0) arrive(p, written), written = -1;
                if (work.splits.counter >= 0) written = work.splits.counter;
                store_partial(p, work, row, column, out, row_scales, rows.maximum, rows.sum);
            }
        }
        if (finished) store_rows(p, work, row, column, out, rows.maximum, rows.sum, staging_address(shared));
    }
    if (written < 0) return written == -1;
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    arrive(p, written);
    return true;
}

}  // namespace paged_mla_decode

extern "C" __global__ void __launch_bounds__(paged_mla_decode::THREADS, 1)
    KERNEL_NAME(const __grid_constant__ PagedMlaDecodeParams p) {
    using namespace paged_mla_decode;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == WARPGROUP) {
        for (int b = 0; b < STAGES; ++b) {
            for (int box = 0; box < BOXES; ++box) mbarrier_init(shared_address(&shared.full[b][box]), 1);
            for (int i = 0; i < EMPTY_BARRIERS; ++i) mbarrier_init(shared_address(&shared.empty[b][i]), WARPGROUP / 32);
        }
        mbarrier_init(shared_address(&shared.q_full), HELPERS);
        mbarrier_init(shared_address(&shared.q_empty), CONSUMERS / 32);
        fence_mbarrier_init();
        prefetch_tensor_map(&p.kv_map);
    }
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_work_range(p, shared.range);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == CONSUMERS / WARPGROUP)
        prefetch_speculatively(p, __shfl_sync(~0u, (threadIdx.x - CONSUMERS) / 32, 0));
    __syncthreads();
    const WorkRange& range = shared.range;
    if (warpgroup >= CONSUMERS / WARPGROUP) {
        setmaxnreg_dec<HELPER_REGISTERS>();
        load(p, range, shared);
        allow_next_grid();
        if (blockIdx.x == 0) report_invalid_lengths(p, threadIdx.x - CONSUMERS, HELPERS);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        if (consume(p, range, shared)) merge_range(p, range, reinterpret_cast<char*>(&shared));
    }
}
