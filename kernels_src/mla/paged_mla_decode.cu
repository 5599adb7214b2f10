// Paged decode of multi-head latent attention: queries of LATENT + 64 columns, keys in a paged latent cache of as many,
// values the first LATENT columns of the same rows. bf16 in, fp32 accumulation.
//
//   page table --> bulk tensor copies --> 2 buffers of 64 keys, each LATENT / 64 + 1 boxes of 64 columns
//   queries    -->                        64 rows (tokens x heads), once a piece
//   by 4 warps
//
//   warpgroup 0                                warpgroup 1
//     S0 = Q K0^T, P0 = softmax                  S1 = Q K1^T
//     P0 and the maxima --> shared memory -->    P1 = softmax, on from those maxima
//     O left += P0 V0 left                       O right += P0 V0 right
//     O left += P1 V1 left    <-- shared memory <-- P1 and the maxima
//                                                O right += P1 V1 right
//
// Each warpgroup has 64 x LATENT / 2 of O in registers, the scores of every other tile, and all 64 rows. The rope columns of
// the queries are in registers too. The maxima pass from tile to tile, in turn through both warpgroups; a maximum follows
// only when it grows by more than 2^8, so that O is seldom rescaled.
//
// A tile's time is bounded by shared memory: the scores read 128 bytes a cycle as they are computed. What keeps the products
// waiting is the way of the next tile into a buffer, so each quarter of one is loaded as soon as its values are multiplied.
// All control flow but for single lanes is the same for a whole warp, and the compiler must see that: operands of products
// and copies are in uniform registers then, else moving them there takes longer than a product.
//
// The grid is persistent and comes from bounds alone. CTAs work in teams of `cta_group_size`, each member on its own row
// tile of a request, so that the second read of a key comes from L2. All tiles of all (request, block of row tiles) lie on
// one line, cut evenly among the teams; with `splits` > 0 pairs are cut into equal parts by their own length alone (see
// split_count) and a team takes the parts that begin in its share. Partials are merged from the last part to the first once a
// CTA is through with its pieces, by all the CTAs that have parts of the pair and are at hand. No CTA needs another one to run.
//
// Build: -DLATENT=512|256 -DKV_E4M3=0 -DROWS=64 -DTILE_TOKENS=64 -DBOX_COLUMNS=64 -DSHARED_BYTES=n -DKERNEL_NAME=symbol

#include "loading.cuh"
#include "accumulators.cuh"
#include "softmax.cuh"

namespace paged_mla_decode {

constexpr int P0_READY = 2;
constexpr int P1_READY = 3;
constexpr int OWN_WARPGROUP = 4;  // and 5

using Output = float[HALF_COLUMNS / 2];

// The box that comes i-th into buffer B: the rope columns, then quarters in the order in which they become free.
template <int B>
DEVICE constexpr int box_of(int i) {
    if (i == 0) return ROPE_BOX;
    return quarter_of(B, (i - 1) / QUARTER_BOXES) * QUARTER_BOXES + (i - 1) % QUARTER_BOXES;
}

using RopeQueries = uint32_t[BOX_COLUMNS / 16][4];

DEVICE void load_rope_queries(Shared& shared, RopeQueries& q) {
#pragma unroll
    for (int step = 0; step < BOX_COLUMNS / 16; ++step)
        load_matrix_x4(q[step], fragment_place(shared_address(shared.q[ROPE_BOX]), step));
}

// S = Q K^T of the tile in buffer B.
template <int B>
DEVICE void multiply_keys(Shared& shared, const RopeQueries& rope, uint32_t parity, Scores& s) {
    const uint64_t q = depth_major_operand(shared_address(shared.q[0]));
    const uint64_t k = depth_major_operand(shared_address(shared.kv[B][0]));
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        const int box = box_of<B>(i);
        wait_barrier(shared.full[B][box], parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BOX_COLUMNS / 16; ++step) {
            const uint32_t offset = box * BOX_BYTES + step * 32;
            if (box == ROPE_BOX && i + step > 0)
                wgmma<false, false>(s, rope[step], advance_operand(k, offset));
            else if (box == ROPE_BOX)
                wgmma<false, false, false>(s, rope[step], advance_operand(k, offset));
            else
                wgmma_64x64<false>(s, advance_operand(q, offset), advance_operand(k, offset), i + step > 0);
        }
    }
    wgmma_commit();
}

// Rows past the length may hold NaN, and 0 x NaN is NaN: they become zero before anyone multiplies by them.
DEVICE void clear_rows(Shared& shared, int b, int valid) {
    const int chunk = threadIdx.x % WARPGROUP;
    for (int i = chunk; i < (TILE_TOKENS - valid) * 8 * VALUE_BOXES; i += WARPGROUP) {
        const int row = valid + i / (8 * VALUE_BOXES), column = i % (8 * VALUE_BOXES);
        *reinterpret_cast<uint4*>(&shared.kv[b][column / 8][row * 128 + column % 8 * 16]) = make_uint4(0, 0, 0, 0);
    }
}

// Where P of buffer B's tile lies: the queries' rope columns are in registers.
template <int B>
DEVICE uint32_t place_of_p(Shared& shared) {
    return shared_address(B == 0 ? shared.q[ROPE_BOX] : shared.p1);
}

// P = 2^(scaled S - maximum) of keys 16 STEP on, as the A operand of the second product; adds it to `sum`.
template <int STEP>
DEVICE void exponentiate(Scores& s, float scale, const Rows& rows, Probabilities& probability, float (&sum)[4]) {
#pragma unroll
    for (int i = STEP * 8; i < STEP * 8 + 8; ++i) {
        s[i] = exp2_approximate(fmaf(s[i], scale, -rows.maximum[i / 2 % 2]));
        sum[i % 4] += s[i];
        if (i % 2 == 1) probability[STEP][i / 2 % 4] = pack_bf16(s[i - 1], s[i]);
    }
}

// The maxima of rows whose scores exceed them by too much follow, and are shown to the other warpgroup. Returns the factors of
// what was summed so far. Lanes compare theirs only if one exceeds.
template <int WG>
DEVICE void lead_maxima(Shared& shared, int row, const Scores& s, float scale, Rows& rows, float (&factor)[2]) {
    float top[2];
    own_maxima(s, top);
    bool over = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        top[i] *= scale;
        over |= top[i] > rows.maximum[i] + MAXIMUM_SLACK;
        factor[i] = 1.f;
    }
    const bool grown = __any_sync(~0u, over);
    if (grown) {
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
    if (threadIdx.x % 32 == 0) shared.grown[WG][threadIdx.x % WARPGROUP / 32] = grown;
}

// Hands P (and cleared rows) of buffer WG to the other warpgroup.
template <int WG>
DEVICE void share_probabilities(Shared& shared, const Probabilities& probability, int valid) {
    if (valid < TILE_TOKENS) named_barrier_sync<WARPGROUP>(OWN_WARPGROUP + WG);  // no warp reads the keys any more
    if (valid < TILE_TOKENS) clear_rows(shared, WG, valid);
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        store_matrix_x4(fragment_place(place_of_p<WG>(shared), step), probability[step]);
    fence_async_proxy();
    named_barrier_arrive<CONSUMERS>(WG == 0 ? P0_READY : P1_READY);
    if (valid < TILE_TOKENS) named_barrier_sync<WARPGROUP>(OWN_WARPGROUP + WG);
}

DEVICE void rescale(Output& out, const float (&factor)[2]) {
    if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < HALF_COLUMNS / 2; ++i) out[i] *= factor[i / 2 % 2];
}

// Barrier `which` of buffer `b`: this warp has read what it stands for.
DEVICE void release(Shared& shared, int b, int which) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.empty[b][which]));
}

template <int WG>
DEVICE uint64_t values(Shared& shared, int b, int half) {
    return outer_major_operand(shared_address(shared.kv[b][WG * HALF_BOXES + half * QUARTER_BOXES]), BOX_BYTES);
}

// O += P V of buffer WG, whose P this warpgroup has in registers: both quarters are under way when this returns.
template <int WG>
DEVICE void multiply_own_values(Shared& shared, const Probabilities& probability, Output& out) {
    hold_registers(out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma<false, true, true, 0, QUARTER_COLUMNS>(out, probability[step],
                                                     advance_operand(values<WG>(shared, WG, 0), step * 16 * 128));
    wgmma_commit();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma<false, true, true, QUARTER_COLUMNS, QUARTER_COLUMNS>(
            out, probability[step], advance_operand(values<WG>(shared, WG, 1), step * 16 * 128));
    wgmma_commit();
}

// Likewise of the other's buffer and P, one product after the other.
struct OtherValues {
    static constexpr int PRODUCTS = 2 * TILE_TOKENS / 16;
    uint64_t p, v[2];

    template <int WG>
    DEVICE void begin(Shared& shared, Output& out) {
        p = depth_major_operand(place_of_p<1 - WG>(shared));
        for (int i = 0; i < 2; ++i) v[i] = values<WG>(shared, 1 - WG, i);
        hold_registers(out);
        wgmma_fence();
    }
    template <int I>
    DEVICE void multiply(Output& out) {
        wgmma_fence();
        constexpr int HALF = I / 4, STEP = I % 4;
        wgmma_add<false, HALF * QUARTER_COLUMNS, QUARTER_COLUMNS>(out, advance_operand(p, STEP * 32),
                                                                  advance_operand(v[HALF], STEP * 16 * 128));
        if (STEP == 3) wgmma_commit();
    }
    DEVICE void multiply_all(Output& out) {
        multiply<0>(out), multiply<1>(out), multiply<2>(out), multiply<3>(out);
        multiply<4>(out), multiply<5>(out), multiply<6>(out), multiply<7>(out);
    }
};

// Each quarter of buffer `b` becomes free when its product, of the two latest, is done.
template <int WG>
DEVICE void release_values(Shared& shared, int b, Output& out) {
    wgmma_wait<1>();
    release(shared, b, WG * 2);
    wgmma_wait<0>();
    hold_registers(out);
    release(shared, b, WG * 2 + 1);
}

// This warp needs the queries of the piece no more.
DEVICE void release_queries(Shared& shared) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared.q_empty));
}

// The other warpgroup has its P. Where it brought maxima on, this one follows.
template <int WG>
DEVICE void follow_maxima(Shared& shared, int row, Rows& rows, Output& out) {
    if (!__any_sync(~0u, shared.grown[1 - WG][threadIdx.x % WARPGROUP / 32])) return;
    float factor[2];
    for (int i = 0; i < 2; ++i) {
        const float maximum = shared.maximum[1 - WG][row + 8 * i];
        factor[i] = exp2_approximate(rows.maximum[i] - maximum);
        rows.maximum[i] = maximum;
        rows.sum[i] *= factor[i];
    }
    rescale(out, factor);
}

// Warpgroup 0: the scores of the even tiles.
DEVICE void lead_tiles(Shared& shared, const Piece& piece, const RopeQueries& rope, int row, float scale_log2, uint32_t& full,
                       Rows& rows, Output& out) {
    const int last = piece.first + piece.steps();
    const float scale = fabsf(scale_log2);
#pragma unroll 1
    for (int tile = piece.first; tile < last; tile += 2) {
        Scores s;
        Probabilities probability;
        float factor[2];
        multiply_keys<0>(shared, rope, full, s);
        full ^= 1;
        wgmma_wait<0>();
        hold_registers(s);
        release(shared, 0, QUARTERS);
        mask_scores(piece, tile, rows, scale_log2 < 0.f, s);
        lead_maxima<0>(shared, row, s, scale, rows, factor);
        float sum[4] = {};
        exponentiate<0>(s, scale, rows, probability, sum);
        exponentiate<1>(s, scale, rows, probability, sum);
        exponentiate<2>(s, scale, rows, probability, sum);
        exponentiate<3>(s, scale, rows, probability, sum);
        rows.sum[0] += sum[0] + sum[1], rows.sum[1] += sum[2] + sum[3];
        share_probabilities<0>(shared, probability, piece.valid(tile));
        rescale(out, factor);
        multiply_own_values<0>(shared, probability, out);
        release_values<0>(shared, 0, out);
        if (tile + 1 >= last) break;
        named_barrier_sync<CONSUMERS>(P1_READY);
        follow_maxima<0>(shared, row, rows, out);
        OtherValues other;
        other.begin<0>(shared, out);
        other.multiply_all(out);
        release_values<0>(shared, 1, out);
    }
}

// Warpgroup 1: the scores of the odd tiles. The even tile's values are multiplied while their softmax is computed: a warp that
// issues a product waits until those before have begun, so the products are issued between parts of the softmax.
DEVICE void follow_tiles(Shared& shared, const Piece& piece, const RopeQueries& rope, int row, float scale_log2,
                         uint32_t& full, Rows& rows, Output& out) {
    const int last = piece.first + piece.steps();
    const float scale = fabsf(scale_log2);
    int tile = piece.first;
#pragma unroll 1
    for (; tile + 1 < last; tile += 2) {
        Scores s;
        Probabilities probability;
        OtherValues other;
        float factor[2];
        wgmma_wait<0>();
        hold_registers(out);
        multiply_keys<1>(shared, rope, full, s);
        full ^= 1;
        named_barrier_sync<CONSUMERS>(P0_READY);
        follow_maxima<1>(shared, row, rows, out);
        other.begin<1>(shared, out);
        other.multiply<0>(out), other.multiply<1>(out);
        wgmma_commit();
        wgmma_wait<1>();
        hold_registers(s);
        release(shared, 1, QUARTERS);
        mask_scores(piece, tile + 1, rows, scale_log2 < 0.f, s);
        lead_maxima<1>(shared, row, s, scale, rows, factor);
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
        share_probabilities<1>(shared, probability, piece.valid(tile + 1));
        other.multiply<6>(out), other.multiply<7>(out);
        release_values<1>(shared, 0, out);
        rescale(out, factor);
        multiply_own_values<1>(shared, probability, out);
        release_values<1>(shared, 1, out);
    }
    if (tile >= last) return;
    named_barrier_sync<CONSUMERS>(P0_READY);
    follow_maxima<1>(shared, row, rows, out);
    OtherValues other;
    other.begin<1>(shared, out);
    other.multiply_all(out);
    release_values<1>(shared, 0, out);
}

// Where a warp brings rows of outputs in order.
DEVICE uint32_t stage_of(Shared& shared) {
    return shared_address(shared.p1) + threadIdx.x / 32 * (BOX_BYTES / (CONSUMERS / 32));
}

// The loaders tell: code and lengths that were not used for long come from far.
DEVICE bool next_piece(Shared& shared, uint32_t q_full, Piece& piece) {
    wait_barrier(shared.q_full, q_full);
    piece = shared.piece[q_full];
    return piece.parts > 0;
}

// Returns whether there were partials.
DEVICE bool consume(const Params& p, const Share& share, Shared& shared) {
    const float scale = softmax_scale_log2(p);
    const float scale_log2 = scale == 0.f ? 1e-30f : scale;  // 0 x -inf is NaN
    uint32_t full = 0, q_full = 0;  // parities
    // Counter of the last part that was written: said with the next, when the writes had time. -1: it is said; -2: no part.
    int written = -2;
    Walker walker(p, share);
    Piece piece;
    for (bool any = walker.next(piece); any; any = next_piece(shared, q_full, piece)) {
        const int thread = thread_anew();
        const int warpgroup = __shfl_sync(~0u, thread / WARPGROUP, 0);
        const int row = thread % WARPGROUP / 32 * 16 + thread % 32 / 4;  // the first of the thread's two
        Rows rows;
        for (int i = 0; i < 2; ++i) {
            rows.visible[i] = visible_drafts(p, piece, row + 8 * i);
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
        // P is written where the rope queries were; and the last piece's sums are read.
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        if (warpgroup == 0)
            lead_tiles(shared, piece, rope, row, scale_log2, full, rows, out);
        else
            follow_tiles(shared, piece, rope, row, scale_log2, full, rows, out);
        release_queries(shared);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int step = 1; step < 4; step *= 2) rows.sum[i] += __shfl_xor_sync(~0u, rows.sum[i], step);
            if (threadIdx.x % 4 == 0) shared.sum[warpgroup][row + 8 * i] = rows.sum[i];
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        for (int i = 0; i < 2; ++i) rows.sum[i] = shared.sum[0][row + 8 * i] + shared.sum[1][row + 8 * i];
        const int column = warpgroup * HALF_COLUMNS;
        bool finished = piece.whole();
        if (!finished) {
            const RowPowers powers(out);
            finished = piece.counter < 0 && piece.part == piece.parts - 1;
            if (finished) {
                fold_parts(p, piece, row, column, out, powers, rows.maximum, rows.sum);
            } else {
                if (written >= 0) arrive(p, written), written = -1;
                if (piece.counter >= 0) written = piece.counter;
                write_partial(p, piece, row, column, out, powers, rows.maximum, rows.sum);
            }
        }
        if (finished) write_rows(p, piece, row, column, out, rows.maximum, rows.sum, stage_of(shared));
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
    extern __shared__ __align__(1024) char shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    if (threadIdx.x == WARPGROUP) {
        for (int b = 0; b < BUFFERS; ++b) {
            for (int box = 0; box < BOXES; ++box)
                mbarrier_init(shared_address(&shared.full[b][box]), 1);
            for (int i = 0; i < EMPTIES; ++i)
                mbarrier_init(shared_address(&shared.empty[b][i]), WARPGROUP / 32);
        }
        mbarrier_init(shared_address(&shared.q_full), HELPERS);
        mbarrier_init(shared_address(&shared.q_empty), CONSUMERS / 32);
        fence_mbarrier_init();
        prefetch_tensor_map(&p.kv_map);
    }
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_share(p, shared.share);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == CONSUMERS / WARPGROUP) guess_first(p, __shfl_sync(~0u, (threadIdx.x - CONSUMERS) / 32, 0));
    __syncthreads();
    const Share& share = shared.share;
    if (warpgroup >= CONSUMERS / WARPGROUP) {
        give_registers<HELPER_REGISTERS>();
        load(p, share, shared);
        allow_next_grid();
        if (blockIdx.x == 0) report_lengths(p, threadIdx.x - CONSUMERS, HELPERS);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        if (consume(p, share, shared)) merge_shares(p, share, shared_memory);
    }
}
