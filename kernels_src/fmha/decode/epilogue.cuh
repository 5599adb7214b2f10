// CTA epilogue: store rows, or write and merge split-KV partials.
#pragma once
#include "scheduler.cuh"

namespace paged_decode {

DEVICE float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The first of a lane's four head dims in a chunk of a row; it may lie past the end of a short row.
DEVICE int chunk_dim(int chunk) { return chunk * 128 + threadIdx.x % 32 * 4; }

// The row of one of a warp's cells, which are the chunks of its rows.
DEVICE int row_of(int cell) { return threadIdx.x / 32 + cell / CHUNKS * CONSUMER_WARPS; }

// Four head dims of a row, summed over the merge buffers.
DEVICE float4 merged(const SharedStorage& shared, int row, int dim) {
    float4 value = *reinterpret_cast<const float4*>(&shared.merge[0][row][dim]);
    for (int b = 1; b < MERGE_BUFFERS; ++b)
        value = value + *reinterpret_cast<const float4*>(&shared.merge[b][row][dim]);
    return value;
}

// How a row of unnormalised sums becomes a row of the output: factor and LSE, both including the sink.
struct Normalisation {
    int64_t token;
    int head;
    float factor, lse;
};

DEVICE Normalisation normalise(const Params& p, const Rows& rows, int row, float output_scale, float top, float total) {
    const RowCoordinates at = coordinates_of(p, rows.first + row);
    Normalisation n;
    n.token = rows.q_begin + at.token;
    n.head = rows.head * p.group + at.head;
    float scale = 1.f;
    if (p.sinks != nullptr) {
        constexpr float LOG2_E = 1.44269504f;
        const float sink = static_cast<const float*>(p.sinks)[n.head] * LOG2_E;
        const float highest = fmaxf(top, sink);
        const float anchor = highest == -INFINITY ? 0.f : highest;
        scale = exp2f(top - anchor);
        total = total * scale + exp2f(sink - anchor);
        top = highest;
    }
    // A row without visible keys has output 0 and LSE -inf.
    n.factor = total == 0.f ? 0.f : scale / total * output_scale;
    n.lse = total == 0.f ? -INFINITY : top + log2f(total);
    return n;
}

// Two neighbouring elements of the output.
DEVICE void write_pair(const Params& p, int64_t element, float low, float high) {
    if (p.out_type == TYPE_E4M3)
        *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + element) = pack_e4m3(low, high);
    else
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + element) =
            p.out_type == TYPE_FP16 ? pack_fp16(low, high) : pack_bf16(low, high);
}

// Four neighbouring elements of the output.
DEVICE void write_row(const Params& p, int64_t element, float4 value) {
    if (p.out_type == TYPE_E4M3)
        *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + element) =
            pack_e4m3(value.x, value.y) | static_cast<uint32_t>(pack_e4m3(value.z, value.w)) << 16;
    else
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + element) =
            p.out_type == TYPE_FP16 ? make_uint2(pack_fp16(value.x, value.y), pack_fp16(value.z, value.w))
                                    : make_uint2(pack_bf16(value.x, value.y), pack_bf16(value.z, value.w));
}

DEVICE void write_output(const Params& p, const Normalisation& n, int dim, float4 value) {
    write_row(p, n.token * p.out_token_stride + n.head * p.out_head_stride + dim,
              make_float4(value.x * n.factor, value.y * n.factor, value.z * n.factor, value.w * n.factor));
}

// Called by one thread of a row.
DEVICE void write_lse(const Params& p, const Normalisation& n) {
    if (p.lse != nullptr) static_cast<float*>(p.lse)[n.token * p.lse_token_stride + n.head * p.lse_head_stride] = n.lse;
}

DEVICE int64_t slot_row(int slot, int row) { return static_cast<int64_t>(slot) * ROWS + row; }

// (top, total) stands for total * 2^top; adds another such number.
DEVICE void add_statistics(float& top, float& total, float other_top, float other_total) {
    const float highest = fmaxf(top, other_top);
    const float anchor = highest == -INFINITY ? 0.f : highest;  // nothing visible so far: 0, not NaN
    total = total * exp2_approximate(top - anchor) + other_total * exp2_approximate(other_top - anchor);
    top = highest;
}

// Loads the partial outputs of MERGE_BATCH splits from `begin` on, for CELLS cells of this warp from `first` on. Past
// the last split it loads that one again.
DEVICE void load_partials(const Params& p, const Rows& rows, const SplitSet& splits, int begin, int first,
                          float4 (&loaded)[MERGE_BATCH][CELLS]) {
    const float* partial = static_cast<const float*>(p.partial_out);
#pragma unroll
    for (int i = 0; i < MERGE_BATCH; ++i) {
        const int slot = splits.slot(min(begin + i, splits.count - 1));
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const int row = row_of(first + cell), dim = chunk_dim((first + cell) % CHUNKS);
            loaded[i][cell] =
                row < rows.count && dim < HEAD_DIM
                    ? __ldcg(reinterpret_cast<const float4*>(partial + slot_row(slot, row) * HEAD_DIM + dim))
                    : make_float4(0, 0, 0, 0);
        }
    }
}

// Merges all splits of an output tile in their order.
DEVICE void merge_splits(const Params& p, const Rows& rows, const SplitSet& splits, float output_scale,
                         SharedStorage& shared) {
    const float2* statistics = static_cast<const float2*>(p.partial_statistics);
    // A warp merges the statistics of all splits of its rows with MERGE_LANES lanes per row; a thread may stand for
    // several of these lanes, so that the order of the additions does not depend on ROWS.
    const int own_row = row_of(threadIdx.x % 32 / LANES_PER_ROW * CHUNKS), own_lane = threadIdx.x % LANES_PER_ROW;
    constexpr int PER_THREAD = MERGE_LANES / LANES_PER_ROW;
    const bool exists = own_row < rows.count;
    const auto statistics_of = [&](int split) { return __ldcg(&statistics[slot_row(splits.slot(split), own_row)]); };
    float tops[PER_THREAD], totals[PER_THREAD];
#pragma unroll
    for (int h = 0; h < PER_THREAD; ++h) {
        const int split = own_lane + h * LANES_PER_ROW;
        const float2 first = exists && split < splits.count ? statistics_of(split) : make_float2(-INFINITY, 0.f);
        tops[h] = first.x, totals[h] = first.y;
    }
    float4 loaded[MERGE_BATCH][CELLS];
    load_partials(p, rows, splits, 0, 0, loaded);  // in flight while the weights are computed
#pragma unroll
    for (int h = 0; h < PER_THREAD; ++h) {
        int split = own_lane + h * LANES_PER_ROW;
        if (exists && split < splits.count) {
            shared.weight[own_row][split] = tops[h];
#pragma unroll 1
            for (split += MERGE_LANES; split < splits.count; split += MERGE_LANES) {
                const float2 other = statistics_of(split);
                if (split < WEIGHTS) shared.weight[own_row][split] = other.x;
                add_statistics(tops[h], totals[h], other.x, other.y);
            }
        }
    }
    float top = tops[0];
#pragma unroll
    for (int h = 1; h < PER_THREAD; ++h) top = fmaxf(top, tops[h]);
#pragma unroll
    for (int step = 1; step < LANES_PER_ROW; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible: 0, not NaN
#pragma unroll
    for (int h = 0; h < PER_THREAD; ++h) {
        totals[h] *= exp2_approximate(tops[h] - anchor);
#pragma unroll
        for (int step = 1; step < LANES_PER_ROW; step *= 2) totals[h] += __shfl_xor_sync(~0u, totals[h], step);
    }
#pragma unroll
    for (int step = 1; step < PER_THREAD; step *= 2)
#pragma unroll
        for (int h = 0; h + step < PER_THREAD; h += 2 * step) totals[h] += totals[h + step];
    if (own_lane == 0 && exists) shared.maximum[own_row] = top, shared.sum[own_row] = totals[0];

#pragma unroll 1
    for (int first = 0; first < ROWS_PER_WARP * CHUNKS; first += CELLS) {
        float4 value[CELLS];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) value[cell] = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int base = 0; base < splits.count; base += WEIGHTS) {
            const int count = min(splits.count - base, WEIGHTS);
            // If all weights fit into shared memory, they are computed once, with the first cells.
            if (exists && (first == 0 || splits.count > WEIGHTS))
#pragma unroll 1
                for (int i = own_lane; i < count; i += LANES_PER_ROW) {
                    const float maximum = first + base == 0 ? shared.weight[own_row][i] : statistics_of(base + i).x;
                    shared.weight[own_row][i] = exp2_approximate(maximum - anchor);
                }
            __syncwarp();
#pragma unroll 1
            for (int split = 0; split < count; split += MERGE_BATCH) {
                if (first + base + split > 0) load_partials(p, rows, splits, base + split, first, loaded);
#pragma unroll
                for (int i = 0; i < MERGE_BATCH; ++i)
#pragma unroll
                    for (int cell = 0; cell < CELLS; ++cell) {
                        const int row = row_of(first + cell);
                        const float weight = split + i < count && row < ROWS ? shared.weight[row][split + i] : 0.f;
                        value[cell].x += weight * loaded[i][cell].x;
                        value[cell].y += weight * loaded[i][cell].y;
                        value[cell].z += weight * loaded[i][cell].z;
                        value[cell].w += weight * loaded[i][cell].w;
                    }
            }
            __syncwarp();  // the weights may be overwritten
        }
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const int row = row_of(first + cell), chunk = (first + cell) % CHUNKS, dim = chunk_dim(chunk);
            if (row >= rows.count) continue;
            const Normalisation n = normalise(p, rows, row, output_scale, shared.maximum[row], shared.sum[row]);
            if (dim < HEAD_DIM) write_output(p, n, dim, value[cell]);
            if (dim == 0) write_lse(p, n);
        }
    }
}

// Arrives at the counter of a split output tile; the CTA that arrives last merges. Only thread 0 gets the number of
// earlier arrivals.
DEVICE uint32_t arrive(const Params& p, const SplitSet& splits) {
    // Release: writes ordered before by a barrier are visible to whoever acquires. Acquire: the others' partials
    // are visible.
    return threadIdx.x == 0 ? atomic_add_acq_rel(static_cast<uint32_t*>(p.counters) + splits.counter, 1) : 0;
}

// Merges the output tile if `arrived` says that this CTA came last.
DEVICE void merge_if_last(const Params& p, const Rows& rows, const SplitSet& splits, uint32_t arrived,
                          float output_scale, SharedStorage& shared) {
    const bool is_last = threadIdx.x == 0 && arrived == static_cast<uint32_t>(splits.count - 1);
    if (is_last) static_cast<uint32_t*>(p.counters)[splits.counter] = 0;  // ready for the next launch
    if (named_barrier_any<CONSUMERS>(CONSUMER_BARRIER, is_last)) merge_splits(p, rows, splits, output_scale, shared);
}

// Writes what the consumers left in shared memory: rows of the output, or a split-KV partial.
DEVICE void store_work_tile(const Params& p, const WorkTile& work, const SplitSet& splits, float output_scale,
                            const SharedStorage& shared) {
    const int slot = splits.slot(splits.index);
    for (int row = threadIdx.x / 32; row < work.rows.count; row += CONSUMER_WARPS) {
        Normalisation n;
        if (splits.count == 1) {
            n = normalise(p, work.rows, row, output_scale, shared.maximum[row], shared.sum[row]);
            if (threadIdx.x % 32 == 0) write_lse(p, n);
        }
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int dim = chunk_dim(chunk);
            if (dim >= HEAD_DIM) continue;
            const float4 value = merged(shared, row, dim);
            if (splits.count == 1)
                write_output(p, n, dim, value);
            else
                *reinterpret_cast<float4*>(static_cast<float*>(p.partial_out) + slot_row(slot, row) * HEAD_DIM + dim) =
                    value;
        }
    }
    const uint32_t own = reread_thread_index();
    if (splits.count > 1 && own < work.rows.count)
        static_cast<float2*>(p.partial_statistics)[slot_row(slot, own)] =
            make_float2(shared.maximum[own], shared.sum[own]);
    // the partial is written; shared.merge and its statistics may be overwritten
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
}

#if USE_TMA
// The partials of an output tile lie in the shared memory of its cluster. Each CTA merges an equal number of cells
// (four head dims of a row), over the splits in their order.
DEVICE void merge_in_cluster(const Params& p, const Rows& rows, float output_scale, SharedStorage& shared) {
    constexpr int CELLS_OF_ROW = HEAD_DIM / 4, MAX_SPLITS = DECODE_MAX_CLUSTER_CTAS;
    const int splits = 1 << p.cluster_size_log2, cells = rows.count * CELLS_OF_ROW;
    if (MERGE_BUFFERS > 1)
        for (int cell = threadIdx.x; cell < cells; cell += CONSUMERS) {
            const int row = cell / CELLS_OF_ROW, dim = cell % CELLS_OF_ROW * 4;
            *reinterpret_cast<float4*>(&shared.merge[0][row][dim]) = merged(shared, row, dim);
        }
    cluster_arrive();
    cluster_wait();
    const int cells_per_cta = (cells + splits - 1) >> p.cluster_size_log2, first = blockIdx.x * cells_per_cta;
    for (int cell = first + threadIdx.x; cell < min(first + cells_per_cta, cells); cell += CONSUMERS) {
        const int row = cell / CELLS_OF_ROW, dim = cell % CELLS_OF_ROW * 4;
        float maximum[MAX_SPLITS], sum[MAX_SPLITS];
        float4 partial[MAX_SPLITS];
#pragma unroll
        for (int i = 0; i < MAX_SPLITS; ++i) {
            const bool exists = i < splits;
            const auto remote = [&](const void* local) { return address_in_cta(shared_address(local), i); };
            maximum[i] = exists ? load_cluster_float(remote(&shared.maximum[row])) : -INFINITY;
            sum[i] = exists ? load_cluster_float(remote(&shared.sum[row])) : 0.f;
            partial[i] = exists ? load_cluster_float4(remote(&shared.merge[0][row][dim])) : make_float4(0, 0, 0, 0);
        }
        float top = maximum[0];
#pragma unroll
        for (int i = 1; i < MAX_SPLITS; ++i) top = fmaxf(top, maximum[i]);
        const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible: 0, not NaN
        float total = 0.f;
        float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < MAX_SPLITS; ++i) {
            const float weight = exp2_approximate(maximum[i] - anchor);
            total += weight * sum[i];
            value.x += weight * partial[i].x, value.y += weight * partial[i].y;
            value.z += weight * partial[i].z, value.w += weight * partial[i].w;
        }
        const Normalisation n = normalise(p, rows, row, output_scale, top, total);
        write_output(p, n, dim, value);
        if (dim == 0) write_lse(p, n);
    }
    // No CTA may exit before the others have read its shared memory.
    cluster_arrive_relaxed();
    cluster_wait();
}
#endif

}  // namespace paged_decode
