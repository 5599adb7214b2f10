// What leaves a CTA: finished rows, or partials and the merge of a pair's partials.
#pragma once
#include "work.cuh"

namespace paged_mla_decode {

constexpr int CONSUMER_BARRIER = 1;

// Bits of a counter: parts that are written, warps that are through with the pair, and tickets for units of its merge.
constexpr uint32_t ARRIVAL = 1;
constexpr uint32_t ARRIVALS = (1 << 9) - 1;
constexpr uint32_t DEPARTURE = 1 << 9;
constexpr uint32_t DEPARTURES = (1 << 12) - 1;
constexpr uint32_t TICKET = 1 << 21;
constexpr int HELP_CYCLES = 1 << 14;  // that a warp waits for the other parts of a pair, to share in their merge

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

DEVICE void write_lse(const Params& p, const Piece& piece, int row, float lse) {
    if (p.lse != nullptr)
        static_cast<float*>(p.lse)[row_offset(piece, row, p.heads, p.lse_token_stride, p.lse_head_stride)] = lse;
}

DEVICE int64_t slot_row(int slot, int row) { return static_cast<int64_t>(slot) * ROWS + row; }

DEVICE uint32_t pack_two(const Params& p, float low, float high) {
    if (p.out_type == TYPE_BF16) return pack_bf16(low, high);
    if (p.out_type == TYPE_FP16) return pack_fp16(low, high);
    return pack_e4m3(low, high);
}

// Of each group of 8 columns, a partial is four floats for each of ROWS * 2 lanes: two neighbouring columns of row lane / 4
// (of 16 for each 32 lanes), and those of the row 8 on.
constexpr int COLUMN_GROUPS = LATENT / 8;

DEVICE int64_t partial_place(int slot, int group, int lane) {
    return (static_cast<int64_t>(slot) * COLUMN_GROUPS + group) * (ROWS * 2) + lane;
}

// ---------------------------------------------------------------- merging

// A warp merges a unit: 16 rows of GROUPS groups of columns, parts in order, PARTS of them in flight together.
template <int GROUPS, int PARTS>
DEVICE void merge_unit(const Params& p, const Piece& piece, int unit) {
    const int lane = threadIdx.x % 32;
    const int warp_row = unit / (COLUMN_GROUPS / GROUPS), group = unit % (COLUMN_GROUPS / GROUPS) * GROUPS;
    const int row = warp_row * 16 + lane / 4;
    const float4* partial = static_cast<const float4*>(p.partial_out) + partial_place(0, group, warp_row * 32 + lane);
    const float2* statistics = static_cast<const float2*>(p.partial_statistics) + row;
    float4 loaded[PARTS][GROUPS];
    float peak[PARTS][2];
    const auto load = [&](int base) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const bool exists = base + i < piece.parts;
            const int slot = slot_of(p, piece, base + i);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
                loaded[i][j] = exists ? __ldcg(partial + partial_place(slot, j, 0)) : make_float4(0, 0, 0, 0);
            for (int half = 0; half < 2; ++half)
                peak[i][half] = exists ? __ldcg(&statistics[slot_row(slot, 8 * half)].x) : LOWEST;
        }
    };
    load(0);  // under way while the rows' maxima and sums are found: of every fourth part by each of the four lanes of a row
    float top[2] = {LOWEST, LOWEST}, total[2] = {};
#pragma unroll 1
    for (int base = 0; base < piece.parts; base += 32) {
        float2 own[8][2];
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                own[i][half] = base + 4 * i + lane % 4 < piece.parts
                                   ? __ldcg(&statistics[slot_row(slot_of(p, piece, base + 4 * i + lane % 4), 8 * half)])
                                   : make_float2(LOWEST, 0.f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float maximum = top[half];
#pragma unroll
            for (int i = 0; i < 8; ++i) maximum = fmaxf(maximum, own[i][half].x);
            total[half] *= exp2_approximate(top[half] - maximum);
#pragma unroll
            for (int i = 0; i < 8; ++i) total[half] += own[i][half].y * exp2_approximate(own[i][half].x - maximum);
            top[half] = maximum;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float maximum = top[half];
        for (int step = 1; step < 4; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
        total[half] *= exp2_approximate(top[half] - maximum);
        for (int step = 1; step < 4; step *= 2) total[half] += __shfl_xor_sync(~0u, total[half], step);
        top[half] = maximum;
    }
    float4 value[GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) value[j] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int base = 0; base < piece.parts; base += PARTS) {
        if (base > 0) load(base);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const float low = exp2_approximate(peak[i][0] - top[0]), high = exp2_approximate(peak[i][1] - top[1]);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                value[j].x += low * loaded[i][j].x, value[j].y += low * loaded[i][j].y;
                value[j].z += high * loaded[i][j].z, value[j].w += high * loaded[i][j].w;
            }
        }
    }
    const float scale = output_scale(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + 8 * half;
        if (own >= piece.rows) break;
        const RowEnd end = end_row(p, top[half], total[half], (piece.row_tile * ROWS + own) % p.heads, scale);
        if (group == 0 && lane % 4 == 0) write_lse(p, piece, own, end.lse);
        const int64_t at = row_offset(piece, own, p.heads, p.out_token_stride, p.out_head_stride) + group * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const uint32_t two = pack_two(p, (half ? value[j].z : value[j].x) * end.factor, (half ? value[j].w : value[j].y) * end.factor);
            if (p.out_type != TYPE_E4M3)
                *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + j * 8) = two;
            else
                *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + at + j * 8) = two;
        }
    }
}

// Says that this CTA's part of the pair of that counter is in memory; since it was written all consumers met at a barrier.
DEVICE void arrive(const Params& p, int counter) {
    if (threadIdx.x == 0) add_acquire_release(static_cast<uint32_t*>(p.counters) + counter, ARRIVAL);
}

// A warp takes units of the pair's merge until none is left. One whose pair is not complete waits HELP_CYCLES and then
// goes: no wait here depends on what else runs.
// The merge is done all the same, once, and before the counter is zero: the thread that says that its CTA's part is in
// memory looks after that at the same address, so that the one whose arrival is the last in the counter's order sees all of them at
// its first look. It takes tickets until they are past the units; any lower ticket was taken by a warp that does that unit
// before it departs. Each warp departs once for each part, and only with the last departure does the counter become zero for
// the next launch.
// Seeing all arrivals is what makes the parts readable; tickets and departures order nothing.
// Who merges a row changes nothing in its bits.
DEVICE void help_merge(const Params& p, const Piece& piece) {
    uint32_t* counter = static_cast<uint32_t*>(p.counters) + piece.counter;
    const int lane = threadIdx.x % 32;
    // As the registers allow: groups of columns where there are few parts, and groups times parts in flight beyond.
    constexpr int FEW_PARTS_GROUPS = ROWS < 64 ? 2 : (KV_E4M3 ? 4 : 8), MANY = ROWS < 64 ? 8 : 16;
    const int groups = piece.parts <= 4 ? FEW_PARTS_GROUPS : (piece.parts <= 16 && ROWS == 64 ? 2 : 1);
    const uint32_t units = (piece.rows + 15) / 16 * (COLUMN_GROUPS / groups);
    uint32_t ticket = ~0u;
    if (lane == 0) {
        const int64_t begin = clock64();
        bool complete;
        do {
            complete = (load_acquire(counter) & ARRIVALS) == piece.parts;
        } while (!complete && clock64() - begin < HELP_CYCLES);
        if (complete) ticket = add_relaxed(counter, TICKET) / TICKET;
    }
    __syncwarp();
    for (;;) {
        ticket = __shfl_sync(~0u, ticket, 0);
        if (ticket >= units) break;
        const uint32_t unit = ticket;
        if (lane == 0) ticket = add_relaxed(counter, TICKET) / TICKET;
        if (groups == FEW_PARTS_GROUPS)
            merge_unit<FEW_PARTS_GROUPS, 4>(p, piece, unit);
        else if (groups == 2)
            merge_unit<2, MANY / 2>(p, piece, unit);
        else
            merge_unit<1, MANY>(p, piece, unit);
    }
    if (lane == 0) {
        const uint32_t before = add_relaxed(counter, DEPARTURE);
        if ((before / DEPARTURE & DEPARTURES) == piece.parts * (CONSUMERS / 32) - 1) *counter = 0;
    }
}

// All pairs of which this CTA has written a part.
DEVICE void merge_shares(const Params& p, const Share& share) {
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece))
        if (!piece.whole()) help_merge(p, piece);
}

}  // namespace paged_mla_decode
