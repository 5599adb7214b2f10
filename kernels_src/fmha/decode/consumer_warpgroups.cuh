// Consumers of many rows (sm_90a): warpgroups that multiply 64 rows by whole KV tiles. S = Q K^T with the queries in
// registers, softmax, O += P V with P in registers. With up to 64 rows, the warpgroups take a work tile's KV tiles in
// turn and merge at its end; with 128 rows, each of two warpgroups has half of the rows.
#pragma once
#include "epilogue.cuh"
#include "fp8_conversion.cuh"
#include "queries.cuh"

namespace paged_decode {

static_assert(KV_PARTITIONS * ROWS == 64 * CONSUMER_WARPGROUPS, "a warpgroup multiplies 64 rows");
static_assert(KV_E4M3 || SPAN == 128, "keys and values lie as the products read them");

constexpr int TILE_BLOCKS = TILE_TOKENS / 8;  // of 8 columns in a warpgroup's product

// warp-uniform in a way that the compiler recognises
DEVICE int warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// The first of the warp's 16 rows among the CTA's. The second warpgroup starts with its third warp, so that where few
// rows exist, their warps are on different schedulers.
DEVICE int first_row(uint32_t thread) {
    return (KV_PARTITIONS == 1 ? thread / 128 * 64 : 0) + (thread / 32 + thread / 128 * 2) % 4 * 16;
}

// The first of the thread's two rows; the other is + 8.
DEVICE int own_row(uint32_t thread) { return first_row(thread) + thread % 32 / 4; }

// Whether any of the warp's rows exists. A warp without rows only takes part in what whole warpgroups do.
DEVICE bool has_rows(const WorkTile& work, uint32_t thread) { return first_row(thread) < work.rows.count; }

// What each row sees, for `mask_scores`; in shared memory, since registers are short. Ends with a barrier of the
// consumers.
DEVICE void load_row_facts(const Params& p, const WorkTile& work, SharedStorage& shared) {
    const Request& r = work.request;
    if (threadIdx.x < ROWS) {
        const int token = coordinates_of(p, work.rows.first + threadIdx.x).token;
        const bool exists = threadIdx.x < work.rows.count && follows_keys(p, r, token);
        shared.row_mask[threadIdx.x] = exists ? visible_drafts(p, r, token) : 0;
        shared.row_begin[threadIdx.x] = exists ? window_begin(p, r, token) : NEVER_VISIBLE;
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
}

constexpr int STEP_BYTES = 32;  // of a row that one K step takes
constexpr int PRODUCT_STEPS = HEAD_DIM * (Q_E4M3 ? 1 : 2) / STEP_BYTES;

// A row's fragment for each K step: 4 bytes at 4 (lane % 4), and those + 16.
using QueryFragments = uint32_t[PRODUCT_STEPS][4];

// `scale` receives the factor of each row's scores, which is positive: a negative softmax scale flips the queries'
// signs instead.
DEVICE void load_query(const Params& p, const WorkTile& work, float softmax_scale, QueryFragments& q,
                       float (&scale)[2]) {
    const uint32_t flip = softmax_scale < 0.f ? (Q_E4M3 ? 0x80808080u : 0x80008000u) : 0u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = own_row(threadIdx.x) + i * 8;
        const bool exists = row < work.rows.count;
        const char* at = query_row(p, work, exists ? row : 0);
        int exponent = 0;
        if constexpr (KEYS_CONVERTED) {
            float largest = 0.f;
            if (p.q_type == TYPE_BF16 && exists)
                for (int j = 0; j < HEAD_DIM / 8; ++j) {
                    const float2 value = query_values(p, at, j * 8 + threadIdx.x % 4 * 2);
                    largest = fmaxf(largest, fmaxf(fabsf(value.x), fabsf(value.y)));
                }
            exponent = common_exponent(largest);
        }
        const float divide = power_of_two(-exponent);
#pragma unroll
        for (int step = 0; step < PRODUCT_STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int byte = step * STEP_BYTES + half * 16 + threadIdx.x % 4 * 4;
                uint32_t word = 0;
                if (exists) {
                    if constexpr (KEYS_CONVERTED) {
                        const float2 value = query_values(p, at, byte / 2);
                        word = pack_fp16(value.x * divide, value.y * divide) ^ flip;
                    } else {
                        word = *reinterpret_cast<const uint32_t*>(at + byte) ^ flip;
                    }
                }
                q[step][half * 2 + i] = word;
            }
        // Maxima are taken of unscaled scores. A scale of 0 becomes tiny, since 0 times the -inf of a masked
        // key is NaN.
        scale[i] = fmaxf(fabsf(softmax_scale) * power_of_two(exponent), 1e-37f);
    }
}

constexpr float LOWEST = -1e30f;  // the maximum of no score

// A warpgroup's softmax state: out[4 j + i] is head dim 8 j + 2 (lane % 4) + i % 2 of row own_row(threadIdx.x) + i / 2
// * 8; sum[2 i] is row i's sum over this thread's columns of P or, with SUMS_BY_PRODUCT, over all.
struct Accumulator {
    float maximum[2], sum[4];
    float out[HEAD_DIM / 2];
    DEVICE void clear() {
        for (int i = 0; i < 2; ++i) maximum[i] = LOWEST;
        for (int i = 0; i < 4; ++i) sum[i] = 0.f;
        for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.f;
    }
    DEVICE void hold() {
        fence_registers(out);
        if (SUMS_BY_PRODUCT) fence_registers(sum);
    }
};

// One K step of S = Q K^T; the first one overwrites S.
template <bool ADD>
DEVICE void product_step(uint64_t keys, const QueryFragments& q, float (&s)[TILE_TOKENS / 2], int step) {
    if constexpr (Q_E4M3)
        wgmma_e4m3<ADD>(s, q[step], advance_descriptor(keys, step * STEP_BYTES));
    else
        wgmma<MMA_FP16, false, ADD>(s, q[step],
                                    advance_descriptor(keys, step / 4 * PRODUCT_SPAN_BYTES + step % 4 * STEP_BYTES));
}

// S = Q K^T, still in flight on return.
DEVICE void multiply_keys(uint32_t stage, const QueryFragments& q, float (&s)[TILE_TOKENS / 2]) {
    constexpr int ROW_BYTES = Q_E4M3 ? SPAN : 128;
    const uint64_t keys = k_major_descriptor<ROW_BYTES>(stage);
    fence_registers(s);
    wgmma_fence();
    product_step<false>(keys, q, s, 0);
#pragma unroll
    for (int step = 1; step < PRODUCT_STEPS; ++step) product_step<true>(keys, q, s, step);
    wgmma_commit();
}

// The `count` low bits: none if negative, at most all 32.
DEVICE uint32_t low_bits(int count) { return __funnelshift_lc(~0u, 0, max(count, 0)); }

// Which of the 32 keys from `first` on a row sees whose window begins at key `begin`: bit k stands for key first + k.
// Keys before `prefix` are not drafts; from there on the mask decides.
DEVICE uint32_t visible_keys(int first, int begin, int prefix, DraftMask mask) {
    const int drafts = prefix - first;
    uint32_t low = static_cast<uint32_t>(mask), high = static_cast<uint32_t>(mask >> 32);
    if (drafts <= -32) low = high, high = 0;
    const uint32_t moved = drafts >= 0 ? __funnelshift_lc(0, low, drafts)
                                       : __funnelshift_rc(low, high, -drafts - (drafts <= -32 ? 32 : 0));
    return (low_bits(drafts) | moved) & ~low_bits(begin - first);
}

DEVICE void mask_scores(const WorkTile& work, const SharedStorage& shared, int tile_token,
                        float (&s)[TILE_TOKENS / 2]) {
    const int row = own_row(threadIdx.x), prefix = work.request.kv_len - work.request.q_len;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int begin = shared.row_begin[row + i * 8];
        const DraftMask mask = shared.row_mask[row + i * 8];  // no bits past the last draft token
#pragma unroll
        for (int word = 0; word < TILE_TOKENS / 32; ++word) {
            const uint32_t visible = visible_keys(tile_token + word * 32, begin, prefix, mask) >> threadIdx.x % 4 * 2;
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (!(visible & 1u << (j * 8 + k))) s[(word * 4 + j) * 4 + i * 2 + k] = -INFINITY;
        }
    }
}

using Probabilities = uint32_t[TILE_TOKENS / 16][4];  // P as the A operand of P V

constexpr int CHAINS = 4;  // of maxima and of sums, to hide the latency of each step

// The largest of a thread's scores of each of its rows, with the rows' factors.
DEVICE void own_tops(const float (&scale)[2], const float (&s)[TILE_TOKENS / 2], float (&top)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float tops[CHAINS];
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) {
            const float larger = fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]);
            tops[j % CHAINS] = j < CHAINS ? larger : fmaxf(tops[j % CHAINS], larger);
        }
        top[i] = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])) * scale[i];
    }
}

// Whether a score of the warp's rows is more than MAXIMUM_SLACK above its row's maximum.
DEVICE bool any_above(const float (&top)[2], const Accumulator& acc) {
    const bool over = top[0] > acc.maximum[0] + MAXIMUM_SLACK || top[1] > acc.maximum[1] + MAXIMUM_SLACK;
    return __any_sync(~0u, over);
}

// Raises the maxima of rows with a score of more than MAXIMUM_SLACK above them, and rescales sums to match; `rescale`
// is for outputs. `top` is the largest score of each of the thread's rows, in its own columns.
DEVICE void raise_maxima(float (&top)[2], Accumulator& acc, float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        for (int step = 1; step < 4; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
        const float before = acc.maximum[i];
        if (top[i] > before + MAXIMUM_SLACK) acc.maximum[i] = top[i];
        rescale[i] = exp2_approximate(before - acc.maximum[i]);
        acc.sum[i * 2] *= rescale[i], acc.sum[i * 2 + 1] *= rescale[i];
    }
}

DEVICE void rescale_outputs(const float (&rescale)[2], Accumulator& acc) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 2; ++j) acc.out[j] *= rescale[j / 2 % 2];
}

// Turns S into P. A maximum follows the scores only when they exceed it by MAXIMUM_SLACK: in most tiles a warp only
// finds that none does.
DEVICE void softmax(const float (&scale)[2], float (&s)[TILE_TOKENS / 2], Accumulator& acc,
                    Probabilities& probability) {
    float top[2];
    own_tops(scale, s, top);
    if (any_above(top, acc)) {
        float rescale[2];
        raise_maxima(top, acc, rescale);
        rescale_outputs(rescale, acc);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sums[CHAINS];
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) {
            const float low = exp2_approximate(fmaf(s[j * 4 + i * 2], scale[i], -acc.maximum[i]));
            const float high = exp2_approximate(fmaf(s[j * 4 + i * 2 + 1], scale[i], -acc.maximum[i]));
            if (!SUMS_BY_PRODUCT) sums[j % CHAINS] = j < CHAINS ? low + high : sums[j % CHAINS] + (low + high);
            probability[j / 2][j % 2 * 2 + i] = MMA_FP16 ? pack_fp16(low, high) : pack_bf16(low, high);
        }
        if (!SUMS_BY_PRODUCT) acc.sum[i * 2] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

DEVICE int partition() { return KV_PARTITIONS == 1 ? 0 : warpgroup(); }

// Arrives for the warp, once all its lanes are here.
DEVICE void release(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Invisible tokens may hold NaN, and 0 x NaN is NaN: their values become zeros before the partition's product reads
// them.
DEVICE void clear_values(uint32_t stage, const VisibleTokens& visible, SharedStorage& shared, uint32_t& phase) {
    constexpr int PARTITION_THREADS = CONSUMERS / KV_PARTITIONS;
    for (int at = threadIdx.x % PARTITION_THREADS; at < STAGE_BYTES / 16; at += PARTITION_THREADS)
        if (!visible.has(at * 16 % SPAN_BYTES / SPAN)) store_shared_uint4(stage + at * 16, make_uint4(0, 0, 0, 0));
    fence_async_proxy();
    const uint32_t cleared = shared_address(&shared.cleared[partition()]);
    release(cleared);
    mbarrier_wait(cleared, phase);
    phase ^= 1;
}

// O += P V, still in flight on return.
DEVICE void multiply_values(uint32_t stage, const Probabilities& probability, const SharedStorage& shared,
                            Accumulator& acc) {
    const uint64_t values = mn_major_descriptor(stage, PRODUCT_SPAN_BYTES);
    acc.hold();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) {
        wgmma<MMA_FP16, true>(acc.out, probability[step], advance_descriptor(values, step * 16 * 128));
        if (SUMS_BY_PRODUCT)
            wgmma_8<MMA_FP16>(acc.sum, probability[step], unswizzled_descriptor(shared_address(shared.ones)));
    }
    wgmma_commit();
}

// Writes the accumulators to shared.merge (unnormalised O), maximum and sum.
DEVICE void merge_warpgroups(const WorkTile& work, Accumulator& acc, SharedStorage& shared) {
    const uint32_t thread = reread_thread_index();
    const int first = own_row(thread), own_partition = partition();
    const bool any_rows = has_rows(work, thread);
    for (int i = 0; i < 2; ++i) {
        float sum = acc.sum[i * 2];
        for (int step = 1; step < 4 && !SUMS_BY_PRODUCT; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (thread % 4 == 0) {
            shared.partition_maximum[own_partition][first + i * 8] =
                acc.maximum[i] == LOWEST ? -INFINITY : acc.maximum[i];
            shared.partition_sum[own_partition][first + i * 8] = sum;
        }
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    float weight[2];
    for (int i = 0; i < 2; ++i) {
        const int row = first + i * 8;
        float highest = shared.partition_maximum[0][row];
        for (int w = 1; w < KV_PARTITIONS; ++w) highest = fmaxf(highest, shared.partition_maximum[w][row]);
        const float anchor = highest == -INFINITY ? 0.f : highest;  // no visible key: every weight is 0, not NaN
        weight[i] = exp2_approximate(acc.maximum[i] - anchor);  // 0 for LOWEST too
        if (own_partition == 0 && thread % 4 == 0) {
            float total = 0.f;
            for (int w = 0; w < KV_PARTITIONS; ++w)
                total += shared.partition_sum[w][row] * exp2_approximate(shared.partition_maximum[w][row] - anchor);
            shared.maximum[row] = highest;
            shared.sum[row] = total;
        }
    }
    // Warpgroups add one after the other, so that the order of the additions is fixed.
    for (int round = 0; round < KV_PARTITIONS; ++round) {
        if (round == own_partition && any_rows)
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float2& cell = *reinterpret_cast<float2*>(&shared.merge[0][first + i * 8][j * 8 + thread % 4 * 2]);
                    const float x = acc.out[j * 4 + i * 2] * weight[i], y = acc.out[j * 4 + i * 2 + 1] * weight[i];
                    cell = round == 0 ? make_float2(x, y) : make_float2(cell.x + x, cell.y + y);
                }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    }
}

// Shared-memory addresses of a KV tile's keys or values as the products read them, and of their full and empty
// barriers.
struct Operand {
    uint32_t stage, full, empty, phase;
    DEVICE void wait() const { mbarrier_wait(full, phase); }
};

// A partition's position in the pipeline, and in that of converted tiles.
struct Operands {
    StageState raw;
    ConvertedState converted;
    DEVICE Operands(uint32_t tiles_before) {
        raw.advance_far(2 * tiles_before);
        converted.advance_far(CONVERTED_OF_TILE * tiles_before);
    }
    DEVICE void advance(int kv_tiles) {
        raw.advance(2 * kv_tiles);
        converted.advance(CONVERTED_OF_TILE * kv_tiles);
    }
    template <bool VALUES>
    DEVICE Operand of(SharedStorage& shared) const {
        if constexpr (CONVERTS && (VALUES || KEYS_CONVERTED)) {
            const int index = converted.index + (VALUES ? CONVERTED_OF_TILE - 1 : 0);  // a tile's stages are neighbours
            return {shared_address(shared.converted[index]), shared_address(&shared.converted_full[index]),
                    shared_address(&shared.converted_empty[index]), converted.phase};
        } else {
            const int index = raw.index + VALUES;
            return {shared_address(shared.stages[index]), shared_address(&shared.full[index]),
                    shared_address(&shared.empty[index]), raw.phase};
        }
    }
};

// Computes a partition's KV tiles of a work tile. The product P V of a tile overlaps with the next tile's Q K^T.
DEVICE void consume_tiles(const WorkTile& work, int visible_from, int kv_tiles, const float (&scale)[2],
                          const QueryFragments& q, uint32_t tiles_before, uint32_t& cleared, SharedStorage& shared,
                          Accumulator& acc) {
    const Request& r = work.request;
    // Keys [visible_from, visible_to) are visible to every row.
    const int visible_to = r.kv_len - r.q_len;
    Operands operands(tiles_before);
    operands.advance(partition());
    uint32_t used = 0;  // empty barrier of the values that the product in flight reads
#pragma unroll 1
    for (int tile = partition(); tile < kv_tiles; tile += KV_PARTITIONS) {
        const int tile_token = first_token(work, tile);
        const Operand keys = operands.of<false>(shared), values = operands.of<true>(shared);
        float s[TILE_TOKENS / 2];
        keys.wait();
        multiply_keys(keys.stage, q, s);
        wgmma_wait<0>();
        fence_registers(s);
        acc.hold();
        release(keys.empty);
        if (tile >= KV_PARTITIONS) release(used);
        used = values.empty;
        Probabilities probability;
        if (has_rows(work, reread_thread_index())) {
            if (tile_token + TILE_TOKENS > visible_to || tile_token < visible_from)
                mask_scores(work, shared, tile_token, s);
            softmax(scale, s, acc, probability);
        }
        values.wait();
        if constexpr (!CONVERTS) {
            const VisibleTokens visible(work, tile_token);
            if (!visible.all()) clear_values(values.stage, visible, shared, cleared);
        }
        multiply_values(values.stage, probability, shared, acc);
        operands.advance(KV_PARTITIONS);
    }
    wgmma_wait<0>();
    acc.hold();
    if (partition() < kv_tiles) release(used);
}

#if ROWS == 128 && !KV_E4M3
// The same as `softmax`, while a product reads the probabilities of the last tile and writes the outputs: in place, and
// `rescale` is for those outputs later. Returns whether that is needed.
DEVICE bool exponentiate(const float (&scale)[2], float (&s)[TILE_TOKENS / 2], Accumulator& acc, float (&rescale)[2]) {
    float top[2];
    own_tops(scale, s, top);
    const bool raised = any_above(top, acc);
    if (raised) raise_maxima(top, acc, rescale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sums[CHAINS];
#pragma unroll
        for (int j = 0; j < TILE_BLOCKS; ++j) {
            float &low = s[j * 4 + i * 2], &high = s[j * 4 + i * 2 + 1];
            low = exp2_approximate(fmaf(low, scale[i], -acc.maximum[i]));
            high = exp2_approximate(fmaf(high, scale[i], -acc.maximum[i]));
            sums[j % CHAINS] = j < CHAINS ? low + high : sums[j % CHAINS] + (low + high);
        }
        acc.sum[i * 2] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    return raised;
}

DEVICE void pack(const float (&s)[TILE_TOKENS / 2], Probabilities& probability) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 2; i += 2)
        probability[i / 8][i / 2 % 4] = MMA_FP16 ? pack_fp16(s[i], s[i + 1]) : pack_bf16(s[i], s[i + 1]);
}

// Computes a work tile's KV tiles by two warpgroups of 64 rows. The softmax of a tile overlaps with the product P V of
// the last one; the warpgroups issue their products in turn, so that it overlaps with the other's products as well.
DEVICE void consume_tiles_in_turn(const WorkTile& work, int visible_from, int kv_tiles, const float (&scale)[2],
                                  const QueryFragments& q, uint32_t tiles_before, uint32_t& cleared,
                                  SharedStorage& shared, Accumulator& acc) {
    if (kv_tiles == 0) return;
    const int visible_to = work.request.kv_len - work.request.q_len, own = warpgroup();
    Operands operands(tiles_before);
    float s[TILE_TOKENS / 2], rescale[2];
    Probabilities probability;
    bool raised = false;
    const auto use_scores = [&](int tile, const Operand& keys) {  // which are there
        fence_registers(s);
        release(keys.empty);
        raised = false;
        if (!has_rows(work, reread_thread_index())) return;
        const int token = first_token(work, tile);
        if (token + TILE_TOKENS > visible_to || token < visible_from) mask_scores(work, shared, token, s);
        raised = exponentiate(scale, s, acc, rescale);
    };
    const auto wait_for_values = [&](int tile, const Operand& values) {
        values.wait();
        const VisibleTokens visible(work, first_token(work, tile));
        if (!visible.all()) clear_values(values.stage, visible, shared, cleared);
    };
    {
        const Operand keys = operands.of<false>(shared);
        keys.wait();
        multiply_keys(keys.stage, q, s);
        wgmma_wait<0>();
        use_scores(0, keys);  // outputs are 0, whatever their factor
        pack(s, probability);
    }
#pragma unroll 1
    for (int tile = 1; tile < kv_tiles; ++tile) {
        const Operand values = operands.of<true>(shared);
        // Before the turn: both warpgroups clear values.
        wait_for_values(tile - 1, values);
        operands.advance(1);
        const Operand keys = operands.of<false>(shared);
        keys.wait();
        named_barrier_sync<CONSUMERS>(TURN + own);
        multiply_keys(keys.stage, q, s);
        multiply_values(values.stage, probability, shared, acc);
        named_barrier_arrive<CONSUMERS>(TURN + (own ^ 1));
        wgmma_wait<1>();
        use_scores(tile, keys);
        wgmma_wait<0>();
        acc.hold();
        release(values.empty);
        pack(s, probability);
        if (raised) rescale_outputs(rescale, acc);
    }
    const Operand values = operands.of<true>(shared);
    wait_for_values(kv_tiles - 1, values);
    multiply_values(values.stage, probability, shared, acc);
    wgmma_wait<0>();
    acc.hold();
    release(values.empty);
}
#endif

DEVICE void consume(const Params& p, const WorkRange& range, SharedStorage& shared) {
    float softmax_scale = p.softmax_scale_log2 * device_scale(p.softmax_scale_device);
    float output_scale = p.output_scale * device_scale(p.output_scale_device);
#if KV_E4M3
    const float launch_softmax_scale = softmax_scale, launch_output_scale = output_scale;
#endif
    uint32_t taken = 0;  // KV tiles so far
    uint32_t cleared = 0;  // phase of the partition's barrier
    if (ROWS == 128 && !CONVERTS && warpgroup() == 0) named_barrier_arrive<CONSUMERS>(TURN);  // the first turn
    if (SUMS_BY_PRODUCT && threadIdx.x < 64) {
        shared.ones[threadIdx.x] = 0x3c003c00;  // 1 in fp16
        fence_async_proxy();  // followed by the barrier in load_row_facts
    }
    // A partial's arrival is evaluated during the next work tile; until then its output tile stays open.
    const auto close = [&] {
        if (shared.open_splits.count > 1)
            merge_if_last(p, shared.open_rows, shared.open_splits, shared.open_arrived,
                          KV_E4M3 ? shared.open_output_scale[0] : output_scale, shared);
    };
    for_each_work_tile(p, range, [&](const WorkTile& work) {
#if KV_E4M3
        softmax_scale = launch_softmax_scale * key_scale(p, work);
        output_scale = launch_output_scale * value_scale(p, work);
#endif
        QueryFragments q;
        float scale[2];
        load_query(p, work, softmax_scale, q, scale);
        load_row_facts(p, work, shared);
        Accumulator acc;
        acc.clear();
        const int kv_tiles = tiles_with_keys(work);
#if ROWS == 128 && !KV_E4M3
        const auto compute = consume_tiles_in_turn;
#else
        const auto compute = consume_tiles;
#endif
        compute(work, visible_to_all_from(p, work.request), kv_tiles, scale, q, taken, cleared, shared, acc);
        taken += kv_tiles;
        close();
        merge_warpgroups(work, acc, shared);
#if USE_TMA
        if (merges_in_cluster(p, range)) {
            if (CONVERTS) named_barrier_arrive<CONSUMERS + CONVERTERS>(MERGED_BARRIER);
            return merge_in_cluster(p, work.rows, output_scale, shared);
        }
#endif
        const SplitSet splits = stream_k::splits_of<DecodeTiling>(p, range, work);
        store_work_tile(p, work, splits, output_scale, shared);
        if (threadIdx.x == 0) {
            shared.open_rows = work.rows, shared.open_splits = splits;
#if KV_E4M3
            shared.open_output_scale[0] = output_scale;
#endif
            if (splits.count > 1) shared.open_arrived = arrive(p, splits);
        }
        if (CONVERTS) named_barrier_arrive<CONSUMERS + CONVERTERS>(MERGED_BARRIER);
    });
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    close();
}

}  // namespace paged_decode
