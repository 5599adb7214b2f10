// From what the consumers left in shared memory to the output; the parts of a split pair meet in the workspace.
#pragma once
#include "work.cuh"

namespace paged_decode {

DEVICE float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The first of a lane's four head dims in a chunk of a row; short rows leave lanes without any.
DEVICE int chunk_dim(int chunk) { return chunk * 128 + threadIdx.x % 32 * 4; }

// The row of a warp's cell: cells are the chunks of its rows.
DEVICE int row_of(int cell) { return threadIdx.x / 32 + cell / CHUNKS * CONSUMER_WARPS; }

// Four head dims of a row of what the consumers left.
DEVICE float4 merged(const Shared& shared, int row, int dim) {
    float4 value = *reinterpret_cast<const float4*>(&shared.merge[0][row][dim]);
    for (int b = 1; b < MERGE_BUFFERS; ++b) value = value + *reinterpret_cast<const float4*>(&shared.merge[b][row][dim]);
    return value;
}

// A row's way from unnormalised sums to the output: the factor, and the LSE, both with the sink.
struct Normalisation {
    int64_t token;
    int head;
    float factor, lse;
};

DEVICE Normalisation normalise(const Params& p, const Rows& rows, int row, float output_scale, float top, float total) {
    const RowPlace place = place_of(p, rows.first + row);
    Normalisation n;
    n.token = rows.q_start + place.token;
    n.head = rows.head * p.group + place.head;
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
    // A row without visible keys is 0 with LSE -inf.
    n.factor = total == 0.f ? 0.f : scale / total * output_scale;
    n.lse = total == 0.f ? -INFINITY : top + log2f(total);
    return n;
}

DEVICE void write_output(const Params& p, const Normalisation& n, int dim, float4 value) {
    const int64_t element = n.token * p.out_token_stride + n.head * p.out_head_stride + dim;
    value = make_float4(value.x * n.factor, value.y * n.factor, value.z * n.factor, value.w * n.factor);
    if (p.out_type == TYPE_E4M3)
        *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + element) =
            pack_e4m3(value.x, value.y) | static_cast<uint32_t>(pack_e4m3(value.z, value.w)) << 16;
    else
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + element) =
            p.out_type == TYPE_FP16 ? make_uint2(pack_fp16(value.x, value.y), pack_fp16(value.z, value.w))
                               : make_uint2(pack_bf16(value.x, value.y), pack_bf16(value.z, value.w));
}

// By one thread of a row.
DEVICE void write_lse(const Params& p, const Normalisation& n) {
    if (p.lse != nullptr)
        static_cast<float*>(p.lse)[n.token * p.lse_token_stride + n.head * p.lse_head_stride] = n.lse;
}

DEVICE Parts parts_of(const Params& p, const Share& share, const Piece& piece) {
    Parts parts;
    const Request& r = piece.request;
    if (p.splits > 0) {
        const int row_tiles = (min(p.q_len * p.group, p.max_rows) + ROWS - 1) / ROWS;
        parts.count = split_count(p, r);
        parts.own = piece.split;
        parts.counter = (r.index * row_tiles + piece.row_tile) * p.kv_heads + piece.rows.head;
        parts.base = parts.counter * p.splits;
        parts.step = 1;
        parts.odd_first = 0;
        return parts;
    }
    const int first = piece.first == 0 ? share.team : team_of(share, piece.line_start);
    const int last = piece.last == r.tiles ? share.team : team_of(share, piece.line_start + r.tiles - 1);
    parts.count = last - first + 1;
    parts.own = share.team - first;
    parts.counter = first * p.cta_group_size + share.member;
    // A CTA has at most one part that begins in it and goes on elsewhere (odd slot) and one from elsewhere (even slot).
    parts.base = PARTIALS_PER_CTA * parts.counter;
    parts.step = PARTIALS_PER_CTA * p.cta_group_size;
    parts.odd_first = 1;
    return parts;
}

DEVICE int64_t slot_row(int slot, int row) { return static_cast<int64_t>(slot) * ROWS + row; }

// (top, total) stands for total * 2^top; adds another such number.
DEVICE void add_statistics(float& top, float& total, float other_top, float other_total) {
    const float highest = fmaxf(top, other_top);
    const float anchor = highest == -INFINITY ? 0.f : highest;  // nothing visible so far: 0, not NaN
    total = total * exp2_approximate(top - anchor) + other_total * exp2_approximate(other_top - anchor);
    top = highest;
}

// The partial outputs of MERGE_BATCH parts from `begin` on, for CELLS of this warp from `first` on; past the last part, that
// again.
DEVICE void load_parts(const Params& p, const Rows& rows, const Parts& parts, int begin, int first,
                       float4 (&loaded)[MERGE_BATCH][CELLS]) {
    const float* partial = static_cast<const float*>(p.partial_out);
#pragma unroll
    for (int i = 0; i < MERGE_BATCH; ++i) {
        const int slot = parts.slot(min(begin + i, parts.count - 1));
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const int row = row_of(first + cell), dim = chunk_dim((first + cell) % CHUNKS);
            loaded[i][cell] = row < rows.count && dim < HEAD_DIM
                                  ? __ldcg(reinterpret_cast<const float4*>(partial + slot_row(slot, row) * HEAD_DIM + dim))
                                  : make_float4(0, 0, 0, 0);
        }
    }
}

// All parts of a pair, added in their order.
DEVICE void merge_parts(const Params& p, const Rows& rows, const Parts& parts, float output_scale, Shared& shared) {
    const float2* statistics = static_cast<const float2*>(p.partial_statistics);
    // A warp has all of its rows' parts: MERGE_LANES lanes of a row, of which a thread may be several, so that the order of the
    // additions does not depend on ROWS.
    const int own_row = row_of(threadIdx.x % 32 / LANES_PER_ROW * CHUNKS), own_lane = threadIdx.x % LANES_PER_ROW;
    constexpr int HERE = MERGE_LANES / LANES_PER_ROW;
    const bool exists = own_row < rows.count;
    const auto statistics_of = [&](int part) { return __ldcg(&statistics[slot_row(parts.slot(part), own_row)]); };
    float tops[HERE], totals[HERE];
#pragma unroll
    for (int h = 0; h < HERE; ++h) {
        const int part = own_lane + h * LANES_PER_ROW;
        const float2 first = exists && part < parts.count ? statistics_of(part) : make_float2(-INFINITY, 0.f);
        tops[h] = first.x, totals[h] = first.y;
    }
    float4 loaded[MERGE_BATCH][CELLS];
    load_parts(p, rows, parts, 0, 0, loaded);  // under way while the weights are found
#pragma unroll
    for (int h = 0; h < HERE; ++h) {
        int part = own_lane + h * LANES_PER_ROW;
        if (exists && part < parts.count) {
            shared.weight[own_row][part] = tops[h];
#pragma unroll 1
            for (part += MERGE_LANES; part < parts.count; part += MERGE_LANES) {
                const float2 other = statistics_of(part);
                if (part < WEIGHTS) shared.weight[own_row][part] = other.x;
                add_statistics(tops[h], totals[h], other.x, other.y);
            }
        }
    }
    float top = tops[0];
#pragma unroll
    for (int h = 1; h < HERE; ++h) top = fmaxf(top, tops[h]);
#pragma unroll
    for (int step = 1; step < LANES_PER_ROW; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible: 0, not NaN
#pragma unroll
    for (int h = 0; h < HERE; ++h) {
        totals[h] *= exp2_approximate(tops[h] - anchor);
#pragma unroll
        for (int step = 1; step < LANES_PER_ROW; step *= 2) totals[h] += __shfl_xor_sync(~0u, totals[h], step);
    }
#pragma unroll
    for (int step = 1; step < HERE; step *= 2)
#pragma unroll
        for (int h = 0; h + step < HERE; h += 2 * step) totals[h] += totals[h + step];
    if (own_lane == 0 && exists) shared.maximum[own_row] = top, shared.sum[own_row] = totals[0];

#pragma unroll 1
    for (int first = 0; first < ROWS_PER_WARP * CHUNKS; first += CELLS) {
        float4 value[CELLS];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) value[cell] = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int base = 0; base < parts.count; base += WEIGHTS) {
            const int count = min(parts.count - base, WEIGHTS);
            // Weights that all fit are found once, for the first cells.
            if (exists && (first == 0 || parts.count > WEIGHTS))
#pragma unroll 1
                for (int i = own_lane; i < count; i += LANES_PER_ROW) {
                    const float maximum = first + base == 0 ? shared.weight[own_row][i] : statistics_of(base + i).x;
                    shared.weight[own_row][i] = exp2_approximate(maximum - anchor);
                }
            __syncwarp();
#pragma unroll 1
            for (int part = 0; part < count; part += MERGE_BATCH) {
                if (first + base + part > 0) load_parts(p, rows, parts, base + part, first, loaded);
#pragma unroll
                for (int i = 0; i < MERGE_BATCH; ++i)
#pragma unroll
                    for (int cell = 0; cell < CELLS; ++cell) {
                        const int row = row_of(first + cell);
                        const float weight = part + i < count && row < ROWS ? shared.weight[row][part + i] : 0.f;
                        value[cell].x += weight * loaded[i][cell].x;
                        value[cell].y += weight * loaded[i][cell].y;
                        value[cell].z += weight * loaded[i][cell].z;
                        value[cell].w += weight * loaded[i][cell].w;
                    }
            }
            __syncwarp();  // the weights are free again
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

// Arrives at the counter of a split pair; whoever arrives last merges. Thread 0 alone knows the others' number.
DEVICE uint32_t arrive(const Params& p, const Parts& parts) {
    // Release: what a barrier ordered before is seen by whoever acquires; acquire: it sees the others' parts.
    return threadIdx.x == 0 ? add_acquire_release(static_cast<uint32_t*>(p.counters) + parts.counter, 1) : 0;
}

// Merges the pair if `arrived` says that this CTA came last.
DEVICE void merge_if_last(const Params& p, const Rows& rows, const Parts& parts, uint32_t arrived, float output_scale,
                          Shared& shared) {
    if (threadIdx.x == 0) {
        const bool is_last = arrived == static_cast<uint32_t>(parts.count - 1);
        if (is_last) static_cast<uint32_t*>(p.counters)[parts.counter] = 0;  // ready for the next launch
        shared.arrived_last = is_last;
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    if (shared.arrived_last) merge_parts(p, rows, parts, output_scale, shared);
}

// What the consumers left goes to the output, or as one part of a split pair to the workspace.
DEVICE void write_piece(const Params& p, const Piece& piece, const Parts& parts, float output_scale, const Shared& shared) {
    const int slot = parts.slot(parts.own);
    for (int row = threadIdx.x / 32; row < piece.rows.count; row += CONSUMER_WARPS) {
        Normalisation n;
        if (parts.count == 1) {
            n = normalise(p, piece.rows, row, output_scale, shared.maximum[row], shared.sum[row]);
            if (threadIdx.x % 32 == 0) write_lse(p, n);
        }
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int dim = chunk_dim(chunk);
            if (dim >= HEAD_DIM) continue;
            const float4 value = merged(shared, row, dim);
            if (parts.count == 1)
                write_output(p, n, dim, value);
            else
                *reinterpret_cast<float4*>(static_cast<float*>(p.partial_out) + slot_row(slot, row) * HEAD_DIM + dim) = value;
        }
    }
    const uint32_t own = thread_anew();
    if (parts.count > 1 && own < piece.rows.count)
        static_cast<float2*>(p.partial_statistics)[slot_row(slot, own)] = make_float2(shared.maximum[own], shared.sum[own]);
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // the part is written; shared.merge and its statistics are free again
}

#if USE_TMA
// The parts of a pair are in its cluster's shared memory: each CTA merges as many cells, of four head dims of a row, the parts
// in their order.
DEVICE void merge_in_cluster(const Params& p, const Rows& rows, float output_scale, Shared& shared) {
    constexpr int CELLS_OF_ROW = HEAD_DIM / 4, MOST_PARTS = DECODE_MAX_CLUSTER_CTAS;
    const int parts = 1 << p.cluster_size_log2, cells = rows.count * CELLS_OF_ROW;
    if (MERGE_BUFFERS > 1)
        for (int cell = threadIdx.x; cell < cells; cell += CONSUMERS) {
            const int row = cell / CELLS_OF_ROW, dim = cell % CELLS_OF_ROW * 4;
            *reinterpret_cast<float4*>(&shared.merge[0][row][dim]) = merged(shared, row, dim);
        }
    cluster_arrive();
    cluster_wait();
    const int share = (cells + parts - 1) >> p.cluster_size_log2, first = blockIdx.x * share;
    for (int cell = first + threadIdx.x; cell < min(first + share, cells); cell += CONSUMERS) {
        const int row = cell / CELLS_OF_ROW, dim = cell % CELLS_OF_ROW * 4;
        float maximum[MOST_PARTS], sum[MOST_PARTS];
        float4 part[MOST_PARTS];
#pragma unroll
        for (int i = 0; i < MOST_PARTS; ++i) {
            const bool exists = i < parts;
            const auto there = [&](const void* here) { return address_in_cta(shared_address(here), i); };
            maximum[i] = exists ? load_cluster_float(there(&shared.maximum[row])) : -INFINITY;
            sum[i] = exists ? load_cluster_float(there(&shared.sum[row])) : 0.f;
            part[i] = exists ? load_cluster_float4(there(&shared.merge[0][row][dim])) : make_float4(0, 0, 0, 0);
        }
        float top = maximum[0];
#pragma unroll
        for (int i = 1; i < MOST_PARTS; ++i) top = fmaxf(top, maximum[i]);
        const float anchor = top == -INFINITY ? 0.f : top;  // nothing visible: 0, not NaN
        float total = 0.f;
        float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < MOST_PARTS; ++i) {
            const float weight = exp2_approximate(maximum[i] - anchor);
            total += weight * sum[i];
            value.x += weight * part[i].x, value.y += weight * part[i].y;
            value.z += weight * part[i].z, value.w += weight * part[i].w;
        }
        const Normalisation n = normalise(p, rows, row, output_scale, top, total);
        write_output(p, n, dim, value);
        if (dim == 0) write_lse(p, n);
    }
    // Nobody's shared memory goes before all have read it.
    cluster_arrive_relaxed();
    cluster_wait();
}
#endif

}  // namespace paged_decode
