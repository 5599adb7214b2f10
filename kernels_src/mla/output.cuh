// What leaves a CTA: finished rows, or partials and the merge of a pair's partials.
#pragma once
#include "work.cuh"

namespace paged_mla_decode {

constexpr int CONSUMER_BARRIER = 1;

// Bits of a counter: parts that are written, CTAs that are through with the pair, and tickets for slices of its merge.
constexpr uint32_t ARRIVAL = 1;
constexpr uint32_t DEPARTURE = 1 << 10;
constexpr uint32_t TICKET = 1 << 20;
constexpr uint32_t FIELD = (1 << 10) - 1;
constexpr int HELP_CYCLES = 1 << 14;  // that a CTA waits for the other parts of a pair, to share in their merge

constexpr float LOG2_E = 1.4426950408889634f;

// How a row of unnormalised outputs with this maximum and sum becomes a row of the output.
struct RowEnd {
    float factor, lse;
};

DEVICE RowEnd end_row(const Params& p, float maximum, float sum, int head, float output_scale) {
    float top = maximum, total = sum;
    if (p.sinks != nullptr) {
        const float sink = static_cast<const float*>(p.sinks)[head] * LOG2_E;
        top = fmaxf(maximum, sink);
        total = sum * exp2_approximate(maximum - top) + exp2_approximate(sink - top);
    }
    const bool none = maximum == LOWEST;  // no visible key
    RowEnd end;
    end.factor = none ? 0.f : output_scale * exp2_approximate(maximum - top) / total;
    end.lse = total == 0.f ? -INFINITY : top + log2f(total);
    return end;
}

DEVICE float output_scale(const Params& p) {
    const float* factor = static_cast<const float*>(p.output_scale_device);
    return factor == nullptr ? p.output_scale : p.output_scale * *factor;
}

DEVICE uint32_t pack_e4m3(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

DEVICE int64_t row_offset(const Piece& piece, int row, int heads, int64_t token_stride, int64_t head_stride) {
    const int request_row = piece.row_tile * ROWS + row;
    return (piece.first_query + request_row / heads) * token_stride + request_row % heads * head_stride;
}

DEVICE void write_lse(const Params& p, const Piece& piece, int row, float lse) {
    if (p.lse != nullptr)
        static_cast<float*>(p.lse)[row_offset(piece, row, p.heads, p.lse_token_stride, p.lse_head_stride)] = lse;
}

DEVICE int64_t slot_row(int slot, int row) { return static_cast<int64_t>(slot) * ROWS + row; }

// ---------------------------------------------------------------- from the accumulators

// Rows lane / 4 and 8 more of the warp's 16; four lanes hold 8 neighbouring columns, and swap so that each has 8 of its own.
template <int TYPE>
DEVICE void write_rows_as(const Params& p, const Piece& piece, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                          const float (&maximum)[2], const float (&sum)[2]) {
    const int lane = threadIdx.x % 32;
    const float scale = output_scale(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + half * 8;
        const bool exists = own < piece.rows;
        const int head = (piece.row_tile * ROWS + min(own, piece.rows - 1)) % p.heads;
        const RowEnd end = end_row(p, maximum[half], sum[half], head, scale);
        if (exists && column == 0 && lane % 4 == 0) write_lse(p, piece, own, end.lse);
        const int64_t offset =
            row_offset(piece, min(own, piece.rows - 1), p.heads, p.out_token_stride, p.out_head_stride) + column;
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 8; j += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = out[4 * (j + i) + 2 * half] * end.factor;
                const float high = out[4 * (j + i) + 2 * half + 1] * end.factor;
                pairs[i] = TYPE == TYPE_BF16 ? pack_bf16(low, high)
                                             : (TYPE == TYPE_FP16 ? pack_fp16(low, high) : pack_e4m3(low, high));
            }
            // Lane l of four gets the pairs of group j + l: two rounds of swaps.
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (i & step) continue;
                    const bool upper = lane & step;
                    const uint32_t sent = upper ? pairs[i] : pairs[i + step];
                    const uint32_t got = __shfl_xor_sync(~0u, sent, step);
                    if (upper)
                        pairs[i] = got;
                    else
                        pairs[i + step] = got;
                }
            }
            if (!exists) continue;
            const int64_t at = offset + 8 * (j + lane % 4);
            if (TYPE != TYPE_E4M3)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            else
                *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) + at) =
                    make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
    }
}

DEVICE void write_rows(const Params& p, const Piece& piece, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                       const float (&maximum)[2], const float (&sum)[2]) {
    if (p.out_type == TYPE_BF16)
        write_rows_as<TYPE_BF16>(p, piece, row, column, out, maximum, sum);
    else if (p.out_type == TYPE_FP16)
        write_rows_as<TYPE_FP16>(p, piece, row, column, out, maximum, sum);
    else
        write_rows_as<TYPE_E4M3>(p, piece, row, column, out, maximum, sum);
}

DEVICE void write_partial(const Params& p, const Piece& piece, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                          const float (&maximum)[2], const float (&sum)[2]) {
    const int lane = threadIdx.x % 32;
    const int slot = slot_of(p, piece, piece.part);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + half * 8;
        if (own >= piece.rows) continue;
        const int64_t at = slot_row(slot, own);
        if (column == 0 && lane % 4 == 0)
            static_cast<float2*>(p.partial_statistics)[at] = make_float2(maximum[half], sum[half]);
        float* target = static_cast<float*>(p.partial_out) + at * LATENT + column + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 8; ++j)
            *reinterpret_cast<float2*>(target + 8 * j) = make_float2(out[4 * j + 2 * half], out[4 * j + 2 * half + 1]);
    }
}

// ---------------------------------------------------------------- merging

constexpr int WARPS_PER_ROW = LATENT / 128;
constexpr int ROWS_AT_ONCE = CONSUMERS / 32 / WARPS_PER_ROW;
constexpr int MOST_SLICES = ROWS / ROWS_AT_ONCE;
constexpr int STATISTICS_AHEAD = ROWS / 2 / (CONSUMERS / 32);  // rows of a slice that one warp finds the weights of

DEVICE void write_four(const Params& p, int64_t at, float4 value) {
    if (p.out_type == TYPE_BF16)
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
            make_uint2(pack_bf16(value.x, value.y), pack_bf16(value.z, value.w));
    else if (p.out_type == TYPE_FP16)
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
            make_uint2(pack_fp16(value.x, value.y), pack_fp16(value.z, value.w));
    else
        *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + at) =
            pack_e4m3(value.x, value.y) | pack_e4m3(value.z, value.w) << 16;
}

// Rows [begin, begin + count) of a merge: what each part counts, 2^(its maximum - the highest) and the row's factor, in
// `weights` [count][parts]. A warp takes every eighth row.
DEVICE void find_weights(const Params& p, const Piece& piece, int begin, int count, float* weights) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float2* statistics = static_cast<const float2*>(p.partial_statistics);
    float2 first[STATISTICS_AHEAD];  // of the first 32 parts
#pragma unroll
    for (int i = 0; i < STATISTICS_AHEAD; ++i) {
        const int row = begin + warp + i * (CONSUMERS / 32);
        const bool exists = row < begin + count && lane < piece.parts;
        first[i] = exists ? __ldcg(&statistics[slot_row(slot_of(p, piece, lane), row)]) : make_float2(LOWEST, 0.f);
    }
    const float scale = output_scale(p);
#pragma unroll
    for (int i = 0; i < STATISTICS_AHEAD; ++i) {
        const int local = warp + i * (CONSUMERS / 32), row = begin + local;
        if (local >= count) break;
        float top = first[i].x;
        for (int part = lane + 32; part < piece.parts; part += 32)
            top = fmaxf(top, __ldcg(&statistics[slot_row(slot_of(p, piece, part), row)]).x);
        for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        float total = 0.f;
        for (int part = lane; part < piece.parts; part += 32) {
            const float2 own = part < 32 ? first[i] : __ldcg(&statistics[slot_row(slot_of(p, piece, part), row)]);
            const float weight = exp2_approximate(own.x - top);
            weights[local * piece.parts + part] = weight;
            total += weight * own.y;
        }
        for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        const RowEnd end = end_row(p, top, total, (piece.row_tile * ROWS + row) % p.heads, scale);
        if (lane == 0) {
            write_lse(p, piece, row, end.lse);
            weights[count * piece.parts + local] = end.factor;
        }
    }
}

// Merges rows [begin, begin + count), parts in order; the loads of BATCH_ROWS x BATCH_PARTS are in flight together.
template <int BATCH_ROWS, int BATCH_PARTS>
DEVICE void merge_slice(const Params& p, const Piece& piece, int begin, int count, float* weights) {
    const int column = threadIdx.x / 32 % WARPS_PER_ROW * 128 + threadIdx.x % 32 * 4;
    const int first = threadIdx.x / 32 / WARPS_PER_ROW;
    const float* partial = static_cast<const float*>(p.partial_out) + column;
    float4 loaded[BATCH_ROWS][BATCH_PARTS];
    const auto load = [&](int local, int base) {
#pragma unroll
        for (int i = 0; i < BATCH_ROWS; ++i)
#pragma unroll
            for (int j = 0; j < BATCH_PARTS; ++j) {
                const int row = begin + min(local + i * ROWS_AT_ONCE, count - 1);
                const int slot = slot_of(p, piece, min(base + j, piece.parts - 1));
                loaded[i][j] = __ldcg(reinterpret_cast<const float4*>(partial + slot_row(slot, row) * LATENT));
            }
    };
    load(first, 0);  // under way while the weights are found
    find_weights(p, piece, begin, count, weights);
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    for (int local = first; local < count; local += BATCH_ROWS * ROWS_AT_ONCE) {
        float4 value[BATCH_ROWS];
#pragma unroll
        for (int i = 0; i < BATCH_ROWS; ++i) value[i] = make_float4(0, 0, 0, 0);
        for (int base = 0; base < piece.parts; base += BATCH_PARTS) {
            if (local > first || base > 0) load(local, base);
#pragma unroll
            for (int i = 0; i < BATCH_ROWS; ++i)
#pragma unroll
                for (int j = 0; j < BATCH_PARTS; ++j) {
                    const int own = min(local + i * ROWS_AT_ONCE, count - 1);
                    const float weight = base + j < piece.parts ? weights[own * piece.parts + base + j] : 0.f;
                    value[i].x += weight * loaded[i][j].x;
                    value[i].y += weight * loaded[i][j].y;
                    value[i].z += weight * loaded[i][j].z;
                    value[i].w += weight * loaded[i][j].w;
                }
        }
#pragma unroll
        for (int i = 0; i < BATCH_ROWS; ++i) {
            const int own = local + i * ROWS_AT_ONCE;
            if (own >= count) break;
            const float factor = weights[count * piece.parts + own];
            value[i].x *= factor, value[i].y *= factor, value[i].z *= factor, value[i].w *= factor;
            write_four(p, row_offset(piece, begin + own, p.heads, p.out_token_stride, p.out_head_stride) + column, value[i]);
        }
    }
}

// Says that this CTA's part of a pair is in memory.
DEVICE void arrive(const Params& p, const Piece& piece) {
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    if (threadIdx.x == 0) add_acquire_release(static_cast<uint32_t*>(p.counters) + piece.counter, ARRIVAL);
}

// Takes slices of the pair's merge until none is left. A CTA whose pair is not complete waits HELP_CYCLES and then goes:
// no wait here depends on what else runs.
// The merge is done all the same, once, and before the counter is zero: a CTA looks after its own arrivals at the same
// address, so that the one whose arrival is the last in the counter's order sees all of them at its first look. It takes
// tickets until they are past the slices; any lower ticket was taken by a CTA that does that slice before it departs.
// Each part departs once, and only with the last departure does the counter become zero for the next launch; a CTA with
// several parts of a pair comes here once for each.
// Seeing all arrivals is what makes the parts readable; tickets and departures order nothing.
// Who merges a row changes nothing in its bits.
DEVICE void help_merge(const Params& p, const Piece& piece, Shared& shared) {
    uint32_t* counter = static_cast<uint32_t*>(p.counters) + piece.counter;
    float* weights = reinterpret_cast<float*>(shared.q);  // all queries were used
    const uint32_t parts = piece.parts;
    int slices = 2;
    while (slices < piece.parts && slices < MOST_SLICES) slices *= 2;
    const int slice_rows = max(ROWS_AT_ONCE, (piece.rows + slices - 1) / slices);
    if (threadIdx.x == 0) {
        const int64_t begin = clock64();
        bool complete;
        do {
            complete = (load_acquire(counter) & FIELD) == parts;
        } while (!complete && clock64() - begin < HELP_CYCLES);
        shared.ticket = complete ? add_relaxed(counter, TICKET) / TICKET : ~0u;
    }
    for (;;) {
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        const uint32_t ticket = shared.ticket;
        if (ticket >= static_cast<uint32_t>(slices)) break;
        named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
        uint32_t next = 0;
        if (threadIdx.x == 0) next = add_relaxed(counter, TICKET);
        const int begin = ticket * slice_rows, count = min(slice_rows, piece.rows - begin);
        if (count > 0) {
            if (piece.parts <= 2)
                merge_slice<8, 2>(p, piece, begin, count, weights);
            else if (piece.parts <= 16)
                merge_slice<4, 4>(p, piece, begin, count, weights);
            else
                merge_slice<1, 16>(p, piece, begin, count, weights);
        }
        if (threadIdx.x == 0) shared.ticket = next / TICKET;
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);  // the ticket is free again
    if (threadIdx.x == 0) {
        const uint32_t before = add_relaxed(counter, DEPARTURE);
        if ((before / DEPARTURE & FIELD) == parts - 1) *counter = 0;
    }
}

// All pairs of which this CTA has written a part.
DEVICE void merge_shares(const Params& p, const Share& share, Shared& shared) {
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece))
        if (!piece.whole()) help_merge(p, piece, shared);
}

}  // namespace paged_mla_decode
