// The consumers of batch-invariant decode with many rows: warpgroups of the same 64 rows, whose products and softmax
// are those of prefill, so that its bits are (common/segments.cuh). The scores of the next tile and the output of the
// last are in flight together.
//
// Two warpgroups have 64 of 128 rows each and issue their products in turn, so that one's softmax overlaps with the
// other's products. Or, with 64 rows (HALVES), they multiply the keys of half of a tile's tokens each, then the values
// of all tokens and half of the columns. Between, they tell each other maxima, sums and probabilities through shared
// memory; the second goes on with the sums where the first ends. Three barriers a tile:
//
//   scores --> maxima --(1)--> probabilities --(2: last tile's have been read)--> shared memory --(3)--> output
//
// e4m3 keys and values become the type of the queries in a pipeline of converted tiles (fp8_conversion.cuh).
#pragma once
#include "fp8_conversion.cuh"
#include "segment_partials.cuh"

namespace paged_decode {

constexpr int WARPGROUP = 128;
constexpr int WARPGROUP_ROWS = 64;
constexpr bool IN_TURN = CONSUMER_WARPGROUPS > 1 && !HALVES;
static_assert(ROWS == WARPGROUP_ROWS * (IN_TURN ? CONSUMER_WARPGROUPS : 1), "a warpgroup multiplies 64 rows");
constexpr int COLUMNS = HEAD_DIM / (HALVES ? 2 : 1);  // of the output, in a warpgroup
constexpr int VALUE_SPANS = COLUMNS * 2 / PRODUCT_SPAN;
constexpr int WARPGROUP_BARRIER = CONSUMER_BARRIER + 1;  // and up, one for each warpgroup
constexpr int QUERY_SPAN_BYTES = ROWS * PRODUCT_SPAN;
constexpr int FOURS = COLUMNS / 8;  // a thread has as many times four outputs

constexpr int PRODUCT_STAGES = CONVERTS ? CONVERTED_STAGES : STAGES;
constexpr int OWN_TOKENS = HALVES ? TILE_TOKENS / 2 : TILE_TOKENS;  // whose scores a warpgroup computes

using QueryFragments = uint32_t[K_STEPS][4];
using Scores = float[OWN_TOKENS / 2];
using Probabilities = uint32_t[OWN_TOKENS / 16][4];
using Output = float[COLUMNS / 2];  // columns as in segments::exponentiate

// The thread's two rows, 8 apart, within the CTA.
DEVICE int warpgroup() { return threadIdx.x / WARPGROUP; }
DEVICE int warp_row() { return (IN_TURN ? threadIdx.x : threadIdx.x % WARPGROUP) / 32 * 16; }
DEVICE int row_of_value(int i) { return warp_row() + threadIdx.x % 32 / 4 + 8 * i; }

// Whether the thread writes the statistics of its rows: one thread of a row does.
DEVICE bool writes_statistics() { return (!HALVES || warpgroup() == 0) && threadIdx.x % 4 == 0; }

struct RowStatistics {
    float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// What is folded of an output tile: in registers, or in shared memory, where each thread reads what it wrote.
struct Folded {
    float own[FOLDS_IN_SHARED ? 1 : COLUMNS / 2];
    float4* cells;
    RowStatistics rows;

    DEVICE explicit Folded(SharedStorage& shared) {
        if constexpr (FOLDS_IN_SHARED) cells = &shared.folded[0][threadIdx.x];
#pragma unroll
        for (int i = 0; i < FOURS; ++i) set(i, make_float4(0, 0, 0, 0));
    }

    // Four outputs of the thread.
    DEVICE float4 get(int i) const {
        if constexpr (FOLDS_IN_SHARED)
            return cells[i * CONSUMERS];
        else
            return make_float4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]);
    }

    DEVICE void set(int i, float4 four) {
        if constexpr (FOLDS_IN_SHARED)
            cells[i * CONSUMERS] = four;
        else
            own[4 * i] = four.x, own[4 * i + 1] = four.y, own[4 * i + 2] = four.z, own[4 * i + 3] = four.w;
    }

    // `four_of(i)`: four outputs of the segment; BATCH of them are there together.
    template <int BATCH, class FourOf>
    DEVICE void fold(const RowStatistics& segment, float scale, FourOf four_of) {
        segments::Fold by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            by[i] = segments::fold_maximum(rows.maximum[i], segment.maximum[i], scale);
            rows.sum[i] = by[i](rows.sum[i], segment.sum[i]);
        }
#pragma unroll(BATCH == FOURS ? FOURS : 1)
        for (int first = 0; first < FOURS; first += BATCH) {
            float4 next[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) next[i] = four_of(first + i);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const float4 before = get(first + i);
                set(first + i, make_float4(by[0](before.x, next[i].x), by[0](before.y, next[i].y),
                                           by[1](before.z, next[i].z), by[1](before.w, next[i].w)));
            }
        }
    }
};

DEVICE float4 four_of(const Output& out, int i) {
    return make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
}

// Copies the queries as the products read them, and finds what each row sees.
DEVICE void load_queries(const Params& p, const WorkTile& work, SharedStorage& shared) {
    constexpr int WORDS = HEAD_DIM / 2;
    find_visible_keys(p, work, shared);
#pragma unroll 2
    for (int i = threadIdx.x; i < ROWS * WORDS; i += CONSUMERS) {
        const int row = i / WORDS, byte = i % WORDS * 4, column = byte / 16;
        const uint32_t word =
            row < work.rows.count ? *reinterpret_cast<const uint32_t*>(query_row(p, work, row) + byte) : 0;
        *reinterpret_cast<uint32_t*>(&shared.query_tile[column / 8 * QUERY_SPAN_BYTES + row * PRODUCT_SPAN +
                                                        ((column ^ row) % 8) * 16 + byte % 16]) = word;
    }
    if constexpr (!HALVES) fence_async_proxy();
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
}

// Where 16 bytes of a row begin in `query_tile`: queries, and with HALVES probabilities in their place.
DEVICE uint32_t query_address(const SharedStorage& shared, int row, int column) {
    return shared_address(shared.query_tile) + column / 8 * QUERY_SPAN_BYTES + row * PRODUCT_SPAN +
           ((column ^ row) % 8) * 16;
}

// Of the 8 x 8 matrices that a lane's address is for, two of rows by two of columns.
DEVICE int matrix_row() { return warp_row() + threadIdx.x % 16; }
DEVICE int matrix_column() { return threadIdx.x % 32 / 16; }

// From shared memory; a barrier must come before it is written again.
DEVICE void load_fragments(const SharedStorage& shared, QueryFragments& q) {
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step)
        ldmatrix_x4(q[step], query_address(shared, matrix_row(), step * 2 + matrix_column()));
}

// S = Q K^T of the warpgroup's tokens of a tile; in flight on return.
DEVICE void multiply_keys(const QueryFragments& q, uint64_t k, Scores& s) {
    fence_registers(s);
    wgmma_fence();
    wgmma<MMA_FP16, false, false>(s, q[0], k);
#pragma unroll
    for (int step = 1; step < K_STEPS; ++step)
        wgmma<MMA_FP16, false>(s, q[step], advance_descriptor(k, step / 4 * PRODUCT_SPAN_BYTES + step % 4 * 32));
    wgmma_commit();
}

// The same with queries in shared memory.
DEVICE void multiply_keys(uint64_t q, uint64_t k, Scores& s) {
    fence_registers(s);
    wgmma_fence();
    wgmma_keys<MMA_FP16, false>(s, q, k);
#pragma unroll
    for (int step = 1; step < K_STEPS; ++step)
        wgmma_keys<MMA_FP16, true>(s, advance_descriptor(q, step / 4 * QUERY_SPAN_BYTES + step % 4 * 32),
                                   advance_descriptor(k, step / 4 * PRODUCT_SPAN_BYTES + step % 4 * 32));
    wgmma_commit();
}

// O += P V of a tile (O = P V if not ADD); in flight on return.
template <bool ADD>
DEVICE void multiply_values(const Probabilities& probability, uint64_t v, Output& out) {
    fence_registers(out);
    wgmma_fence();
    wgmma<MMA_FP16, true, ADD>(out, probability[0], v);
#pragma unroll
    for (int step = 1; step < TILE_TOKENS / 16; ++step)
        wgmma<MMA_FP16, true>(out, probability[step], advance_descriptor(v, step * 16 * PRODUCT_SPAN));
    wgmma_commit();
}

// O += P V of a tile, with P in shared memory; in flight on return.
DEVICE void multiply_values(uint64_t probability, uint64_t v, Output& out) {
    fence_registers(out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
        wgmma_add<MMA_FP16, 0, COLUMNS>(out,
                                        advance_descriptor(probability, step / 4 * QUERY_SPAN_BYTES + step % 4 * 32),
                                        advance_descriptor(v, step * 16 * PRODUCT_SPAN));
    wgmma_commit();
}

DEVICE void pack(const Scores& s, Probabilities& probability) {
#pragma unroll
    for (int i = 0; i < OWN_TOKENS / 2; i += 2)
        probability[i / 8][i / 2 % 4] = MMA_FP16 ? pack_fp16(s[i], s[i + 1]) : pack_bf16(s[i], s[i + 1]);
}

// What segments::exponentiate does, by two warpgroups with half of the tile's tokens each: a thread's sums are four
// chains over 32 tokens, twice.
struct Half {
    float chains[OWN_TOKENS / 32][4];

    // Contains a barrier of the consumers.
    DEVICE void exponentiate(Scores& s, float scale, float (&maximum)[2], float (&factor)[2], HalfExchange& exchange) {
        constexpr int CELLS = OWN_TOKENS / 2, CHAIN = 16;
        float highest[2];
        row_maxima(s, highest);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (threadIdx.x % 4 == 0) exchange.top[warpgroup()][row_of_value(i)] = highest[i];
        }
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        float anchor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float both = fmaxf(highest[i], exchange.top[warpgroup() ^ 1][row_of_value(i)]);
            both = segments::raised(maximum[i], both, scale);
            anchor[i] = segments::anchor_of(both, scale);
            factor[i] = segments::weight(maximum[i], both, scale, anchor[i]);
            maximum[i] = both;
        }
#pragma unroll
        for (int first = 0; first < CELLS; first += CHAIN) {
            float (&chain)[4] = chains[first / CHAIN];
#pragma unroll
            for (int i = 0; i < CHAIN; ++i) {
                float& cell = s[first + i];
                cell = segments::probability(cell, scale, anchor[i / 2 % 2]);
                chain[i % 4] = i < 4 ? cell : __fadd_rn(chain[i % 4], cell);
            }
        }
        if (warpgroup() == 0)
            exchange.sums[threadIdx.x] =
                make_float4(__fadd_rn(chains[0][0], chains[1][0]), __fadd_rn(chains[0][1], chains[1][1]),
                            __fadd_rn(chains[0][2], chains[1][2]), __fadd_rn(chains[0][3], chains[1][3]));
    }

    // The second warpgroup, behind a barrier: the first has no sums of its own.
    DEVICE void add_to(float (&sum)[2], const float (&factor)[2], const HalfExchange& exchange) const {
        if (warpgroup() == 0) return;
        const float4 first = exchange.sums[threadIdx.x % WARPGROUP];
        float all[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) all[i] = __fadd_rn(__fadd_rn(all[i], chains[0][i]), chains[1][i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] = segments::next_sum(sum[i], factor[i], all[2 * i], all[2 * i + 1]);
    }
};

// Scores become probabilities, and sums of them, where a thread has those sums.
template <class TileScores>
DEVICE void exponentiate(TileScores& s, float scale, RowStatistics& rows, float (&factor)[2], Half& half,
                         SharedStorage& shared) {
    if constexpr (HALVES)
        half.exponentiate(s, scale, rows.maximum, factor, shared.halves[0]);
    else
        segments::exponentiate(s, scale, rows.maximum, rows.sum, factor);
}

// The warpgroup's probabilities, for both. Ends with a barrier of the consumers.
DEVICE void tell_probabilities(const Probabilities& p, SharedStorage& shared) {
#pragma unroll
    for (int i = 0; i < OWN_TOKENS / 16; ++i)
        stmatrix_x4(query_address(shared, matrix_row(), warpgroup() * OWN_TOKENS / 8 + i * 2 + matrix_column()), p[i]);
    fence_async_proxy();
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
}

// Values outside [low, high) may be NaN, and 0 x NaN is NaN: those of the warpgroup become zero.
DEVICE void clear_values(char* own_values, int low, int high) {
    constexpr int PIECES = PRODUCT_SPAN / 16;
    for (int i = threadIdx.x % WARPGROUP; i < TILE_TOKENS * PIECES; i += WARPGROUP)
        if (i / PIECES < low || i / PIECES >= high)
#pragma unroll
            for (int span = 0; span < VALUE_SPANS; ++span)
                *reinterpret_cast<uint4*>(own_values + span * PRODUCT_SPAN_BYTES + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    named_barrier_sync<WARPGROUP>(WARPGROUP_BARRIER + warpgroup());
}

DEVICE void release(SharedStorage& shared, int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(shared_address(CONVERTS ? &shared.converted_empty[stage] : &shared.empty[stage]));
}

// The stage of a tile as the products read it.
DEVICE char* product_stage(SharedStorage& shared, int stage) {
    return CONVERTS ? shared.converted[stage] : shared.stages[stage];
}

DEVICE void wait_for_product_stage(SharedStorage& shared, int stage, uint32_t phase) {
    mbarrier_wait(shared_address(CONVERTS ? &shared.converted_full[stage] : &shared.full[stage]), phase);
}

DEVICE void mask(const WorkTile& work, int tile_token, const SharedStorage& shared, Scores& s) {
    const int column = tile_token + (HALVES ? warpgroup() * OWN_TOKENS : 0) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const VisibleKeys sees(work, shared, row_of_value(i), column);
        // First as bits, in a loop: unrolled, this would need more registers than there are beside products in flight.
        uint32_t seen = 0;
#pragma unroll 1
        for (int j = 0; j < OWN_TOKENS / 4; ++j) seen |= static_cast<uint32_t>(sees.key(j / 2 * 8 + j % 2)) << j;
#pragma unroll
        for (int j = 0; j < OWN_TOKENS / 4; ++j)
            if (!(seen >> j & 1)) s[j / 2 * 4 + 2 * i + j % 2] = -INFINITY;
    }
}

// A thread's part of a partial lies where the same thread of another CTA reads it.
DEVICE float4* partial_of(const Params& p, int slot, int cell) {
    const int64_t first = (static_cast<int64_t>(slot) * FOURS + cell) * CONSUMERS;
    return static_cast<float4*>(p.partial_out) + first + reread_thread_index();
}

template <class FourOf>
DEVICE void write_partial(const Params& p, int slot, const RowStatistics& rows, FourOf four_of) {
#pragma unroll
    for (int i = 0; i < FOURS; ++i) *partial_of(p, slot, i) = four_of(i);
    if (writes_statistics())
#pragma unroll
        for (int i = 0; i < 2; ++i)
            static_cast<float2*>(p.partial_statistics)[slot_row(slot, row_of_value(i))] =
                make_float2(rows.maximum[i], rows.sum[i]);
}

// Writes the rows of the output: 16 neighbouring bytes by the four threads of a row.
DEVICE void finish(const Params& p, const WorkTile& work, float scale, const Folded& folded) {
    const Rows& rows = work.rows;
    float output_scale = p.output_scale * device_scale(p.output_scale_device);
#if KV_E4M3
    output_scale *= value_scale(p, work);
#endif
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = row_of_value(i);
        if (row >= rows.count) continue;
        const RowCoordinates at = coordinates_of(p, rows.first + row);
        const int64_t token = rows.q_begin + at.token;
        const int head = rows.head * p.group + at.head;
        const float* sink = p.sinks == nullptr ? nullptr : static_cast<const float*>(p.sinks) + head;
        const segments::Normalisation n =
            segments::normalise({folded.rows.maximum[i], folded.rows.sum[i]}, scale, sink, output_scale, true);
        if (p.lse != nullptr && writes_statistics())
            static_cast<float*>(p.lse)[token * p.lse_token_stride + head * p.lse_head_stride] = n.lse;
        const int64_t element = token * p.out_token_stride + head * p.out_head_stride +
                                (HALVES ? warpgroup() * COLUMNS : 0) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int cell = 0; cell < FOURS; ++cell) {
            const float4 four = folded.get(cell);
            write_pair(p, element + cell * 8, segments::normalised(i == 0 ? four.x : four.z, n.factor),
                       segments::normalised(i == 0 ? four.y : four.w, n.factor));
        }
    }
}

// Folds all partials of an output tile and writes its rows.
DEVICE void fold_partials(const Params& p, const WorkRange& range, const WorkTile& work, float scale,
                          SharedStorage& shared) {
    PartialWalk walk(p, range, work);
    Folded folded(shared);
#pragma unroll 1
    for (int slot; (slot = walk.next_slot()) >= 0;) {
        RowStatistics rows;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 row =
                __ldcg(&static_cast<const float2*>(p.partial_statistics)[slot_row(slot, row_of_value(i))]);
            rows.maximum[i] = row.x, rows.sum[i] = row.y;
        }
        folded.fold<FOLDS_IN_SHARED ? 4 : FOURS>(rows, scale, [&](int i) { return __ldcg(partial_of(p, slot, i)); });
    }
    finish(p, work, scale, folded);
}

DEVICE void consume(const Params& p, const WorkRange& range, SharedStorage& shared) {
    [[maybe_unused]] const Scale launch_scale(p);
    const uint64_t query_tile = k_major_descriptor(shared_address(shared.query_tile) +
                                                   (IN_TURN ? warpgroup() * WARPGROUP_ROWS * PRODUCT_SPAN : 0));
    PipelineState<PRODUCT_STAGES> keys;
    if (IN_TURN && warpgroup() == 0) named_barrier_arrive<CONSUMERS>(TURN);  // the first turn
    for_each_work_tile(p, range, [&](const WorkTile& work) {
        const Request& r = work.request;
#if KV_E4M3
        const Scale scale(p, key_scale(p, work));
#else
        const Scale& scale = launch_scale;
#endif
        const int end = end_tile(work);
        const bool is_prefix = work.first == 0;
        int slot = first_slot(p, range, range.cta_group) + 1;
        Folded folded(shared);
        QueryFragments q;
        Scores s;
        Probabilities probability;
        Output out;
        RowStatistics rows;
        float factor[2];
        Half half;
        const auto clear = [&] {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) out[i] = 0.f;
        };
        if constexpr (HALVES) clear();
        const auto token_of = [&](int tile) { return (r.first_tile + tile) * TILE_TOKENS; };
        const auto start_scores = [&](bool in_turn) {
            wait_for_product_stage(shared, keys.index, keys.phase);
            if (in_turn) named_barrier_sync<CONSUMERS>(TURN + warpgroup());
            const uint32_t stage = shared_address(product_stage(shared, keys.index));
            if constexpr (HALVES)
                multiply_keys(q, k_major_descriptor(stage + warpgroup() * OWN_TOKENS * PRODUCT_SPAN), s);
            else
                multiply_keys(query_tile, k_major_descriptor(stage), s);
        };
        const auto use_scores = [&](int tile) {  // which are there
            fence_registers(s);
            release(shared, keys.index);
            keys.advance(2);
            if (scale.flips)
#pragma unroll
                for (int i = 0; i < OWN_TOKENS / 2; ++i) s[i] = -s[i];
            if (!all_rows_see(p, r, token_of(tile))) mask(work, token_of(tile), shared, s);
            exponentiate(s, scale.log2, rows, factor, half, shared);
        };
        const auto pass_on = [&] {  // no product reads the last tile's probabilities any more
            pack(s, probability);
            if constexpr (HALVES) {
                tell_probabilities(probability, shared);
                half.add_to(rows.sum, factor, shared.halves[0]);
            }
        };
        load_queries(p, work, shared);
        if constexpr (HALVES) load_fragments(shared, q);
        if (work.first < end) {
            start_scores(false);
            wgmma_wait<0>();
            use_scores(work.first);
            pass_on();
        }
#pragma unroll 1
        for (int tile = work.first; tile < end; ++tile) {
            const int token = token_of(tile);
            const bool is_last = tile + 1 == end, ends = ends_segment(r, tile) || is_last;
            if (!is_last) start_scores(IN_TURN);
            // The stage in front of the next keys, which were not released yet.
            const int values = (keys.index + PRODUCT_STAGES - 1) % PRODUCT_STAGES;
            wait_for_product_stage(shared, values, keys.phase ^ (keys.index == 0));
            char* stage = product_stage(shared, values) + (HALVES ? warpgroup() * VALUE_SPANS * PRODUCT_SPAN_BYTES : 0);
            if (!CONVERTS && (token < work.begin || token + TILE_TOKENS > r.kv_len))
                clear_values(stage, work.begin - token, r.kv_len - token);
            const uint64_t v = mn_major_descriptor(shared_address(stage), PRODUCT_SPAN_BYTES);
            if constexpr (HALVES)
                multiply_values(query_tile, v, out);
            else if (tile == work.first || (r.first_tile + tile) % SEGMENT_TILES == 0)
                multiply_values<false>(probability, v, out);
            else
                multiply_values<true>(probability, v, out);
            if (IN_TURN && !is_last) named_barrier_arrive<CONSUMERS>(TURN + (warpgroup() ^ 1));
            RowStatistics segment = rows;
            if (ends) rows = RowStatistics();
            if (!is_last) {
                wgmma_wait<1>();
                use_scores(tile + 1);
            }
            wgmma_wait<0>();
            fence_registers(out);
            release(shared, values);
            if (!is_last) {
                if constexpr (HALVES) named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // which is so for both
                pass_on();
            }
            if (!ends) {
                if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f))
#pragma unroll
                    for (int i = 0; i < COLUMNS / 2; ++i) out[i] = __fmul_rn(out[i], factor[i / 2 % 2]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) segment.sum[i] = segments::segment_sum(segment.sum[i]);
            if constexpr (HALVES) {
                float (&sums)[ROWS] = shared.halves[0].segment_sum[tile % 2];
                if (warpgroup() == 1 && threadIdx.x % 4 == 0)
#pragma unroll
                    for (int i = 0; i < 2; ++i) sums[row_of_value(i)] = segment.sum[i];
                named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
#pragma unroll
                for (int i = 0; i < 2; ++i) segment.sum[i] = sums[row_of_value(i)];
            }
            if (is_prefix)
                folded.fold<FOURS>(segment, scale.log2, [&](int i) { return four_of(out, i); });
            else
                write_partial(p, slot++, segment, [&](int i) { return four_of(out, i); });
            if constexpr (HALVES) clear();
        }
        if (is_prefix) {
            if (work.last == r.kv_tiles) {
                finish(p, work, scale.log2, folded);
                named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // all have read the queries and what rows see
                return;
            }
            write_partial(p, first_slot(p, range, range.cta_group), folded.rows, [&](int i) { return folded.get(i); });
        }
        if (arrives_last(p, work, shared)) fold_partials(p, range, work, scale.log2, shared);
    });
}

}  // namespace paged_decode
