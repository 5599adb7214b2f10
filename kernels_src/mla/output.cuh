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
        total = __fmaf_rn(sum, exp2_approximate(maximum - top), exp2_approximate(sink - top));
    }
    const bool none = maximum == LOWEST;  // no visible key
    RowEnd end;
    end.factor = none ? 0.f : __fdividef(output_scale * exp2_approximate(maximum - top), total);
    end.lse = total == 0.f ? -INFINITY : top + __log2f(total);
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

template <int TYPE>
DEVICE uint32_t pack_two(float low, float high) {
    if (TYPE == TYPE_BF16) return pack_bf16(low, high);
    if (TYPE == TYPE_FP16) return pack_fp16(low, high);
    return pack_e4m3(low, high);
}

DEVICE uint32_t pack_two(const Params& p, float low, float high) {
    if (p.out_type == TYPE_BF16) return pack_two<TYPE_BF16>(low, high);
    if (p.out_type == TYPE_FP16) return pack_two<TYPE_FP16>(low, high);
    return pack_two<TYPE_E4M3>(low, high);
}

// ---------------------------------------------------------------- partials

// A partial is fp16, four for each of ROWS * 2 lanes and each group of 8 columns: two neighbouring columns of row lane / 4 (of
// 16 for each 32 lanes), and those of the row 8 on.
constexpr int COLUMN_GROUPS = LATENT / 8;

DEVICE int64_t partial_place(int slot, int group, int lane) {
    return (static_cast<int64_t>(slot) * COLUMN_GROUPS + group) * (ROWS * 2) + lane;
}

// Beside it each row has its maximum and sum, and a power of two by which the fp16 are to be multiplied for each POWER_COLUMNS
// columns: those of a row that a warp has.
constexpr int POWER_COLUMNS = ROWS < 64 ? 64 : (KV_E4M3 ? LATENT / 8 : LATENT / 2);
constexpr int STATISTICS_BYTES = ROWS * (2 + LATENT / POWER_COLUMNS) * sizeof(float);  // of a slot
static_assert(LATENT / POWER_COLUMNS <= MLA_MAX_ROW_SCALES, "the workspace has room for as many");

DEVICE char* statistics_of(const Params& p, int slot) {
    return static_cast<char*>(p.partial_statistics) + static_cast<int64_t>(slot) * STATISTICS_BYTES;
}

DEVICE float2* maxima_and_sums(const Params& p, int slot) { return reinterpret_cast<float2*>(statistics_of(p, slot)); }

// Of the rows, for the columns from `column` on.
DEVICE float* powers(const Params& p, int slot, int column) {
    return reinterpret_cast<float*>(maxima_and_sums(p, slot) + ROWS) + column / POWER_COLUMNS * ROWS;
}

// The power of two of a row and its reciprocal, from the sum of magnitudes of POWER_COLUMNS columns: it bounds the largest and
// is quicker to have, and fp16 has exponents to spare. The bound becomes 2^14 to 2^15; where it is infinite, no finite number
// becomes as much. Numbers of less than 2^-100 in all lose bits below 2^-125 then.
struct RowPower {
    float power, reciprocal;

    DEVICE explicit RowPower(float magnitudes) {
        constexpr uint32_t LEAST = 127 + 14 - 100;
        const uint32_t biased = max(__float_as_uint(magnitudes) >> 23, LEAST);
        power = __uint_as_float((biased - 14) << 23);
        reciprocal = __uint_as_float((2 * 127 + 14 - biased) << 23);
    }
    DEVICE uint32_t pack(float low, float high) const { return pack_fp16(low * reciprocal, high * reciprocal); }
};

// ---------------------------------------------------------------- merging

// Sums of products whose order and rounding are the same wherever parts are merged.
DEVICE float add_product(float sum, float factor, float value) { return __fmaf_rn(factor, value, sum); }

// What the fp16 of a row's part are multiplied with.
DEVICE float part_weight(float maximum, float top, float power) { return __fmul_rn(exp2_approximate(maximum - top), power); }

template <class T>
DEVICE const T* offset_bytes(const T* from, int64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + bytes);
}

// A warp merges a unit: 16 rows of GROUPS groups of columns, parts from the last to the first, PARTS of them in flight
// together. For a piece without rows and parts it goes through all of its code and reads and writes nothing outside.
template <int GROUPS, int PARTS>
DEVICE void merge_unit(const Params& p, const Piece& piece, int unit, float* weights) {
    constexpr int STATISTICS = ROWS < 64 ? 4 : 8;  // of every fourth part, by each of the four lanes of a row
    const int lane = threadIdx.x % 32;
    const int warp_row = unit / (COLUMN_GROUPS / GROUPS), group = unit % (COLUMN_GROUPS / GROUPS) * GROUPS;
    const int row = warp_row * 16 + lane / 4;
    const uint2* partial = static_cast<const uint2*>(p.partial_out);
    partial += partial_place(piece.slot, group, warp_row * 32 + lane);
    const float2* statistics = maxima_and_sums(p, piece.slot) + row;
    const float* power = powers(p, piece.slot, group * 8) + row;
    // Else each address is computed from the parameter on.
    asm volatile("" : "+l"(partial), "+l"(statistics), "+l"(power));
    // Slots from that of part 0 on, as slot_of counts them.
    const int step = slot_step(p), shift = p.splits == 0;
    const auto slots = [&](int part) { return static_cast<int64_t>(part * step - min(part, shift)); };
    float top[2] = {LOWEST, LOWEST}, total[2] = {};
    const auto weigh = [&] {
        float2 own[STATISTICS][2];
        float own_power[STATISTICS][2];
#pragma unroll 1
        for (bool again = false;; again = true) {
            int base = 0;
#pragma unroll 1
            do {
                if (!again || piece.parts > STATISTICS * 4)
#pragma unroll
                    for (int i = 0; i < STATISTICS; ++i) {
                        const int part = base + 4 * i + lane % 4;
                        const int64_t at = slots(part) * STATISTICS_BYTES;
                        for (int half = 0; half < 2; ++half) {
                            own[i][half] = make_float2(LOWEST, 0.f);
                            own_power[i][half] = 0.f;
                            if (part >= piece.parts) continue;
                            own[i][half] = __ldcg(offset_bytes(statistics + half * 8, at));
                            own_power[i][half] = __ldcg(offset_bytes(power + half * 8, at));
                        }
                    }
                if (again) {
#pragma unroll
                    for (int i = 0; i < STATISTICS; ++i)
                        for (int half = 0; half < 2; ++half)
                            weights[(base + 4 * i + lane % 4) * 16 + lane / 4 + half * 8] =
                                part_weight(own[i][half].x, top[half], own_power[i][half]);
                } else {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float maximum = top[half];
#pragma unroll
                        for (int i = 0; i < STATISTICS; ++i) maximum = fmaxf(maximum, own[i][half].x);
                        total[half] = __fmul_rn(total[half], exp2_approximate(top[half] - maximum));
#pragma unroll
                        for (int i = 0; i < STATISTICS; ++i)
                            total[half] =
                                add_product(total[half], exp2_approximate(own[i][half].x - maximum), own[i][half].y);
                        top[half] = maximum;
                    }
                }
                base += STATISTICS * 4;
            } while (base < piece.parts);
            if (again) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float maximum = top[half];
                for (int step = 1; step < 4; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
                total[half] = __fmul_rn(total[half], exp2_approximate(top[half] - maximum));
                for (int step = 1; step < 4; step *= 2)
                    total[half] = __fadd_rn(total[half], __shfl_xor_sync(~0u, total[half], step));
                top[half] = maximum;
            }
        }
        __syncwarp();
    };
    float4 value[GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) value[j] = make_float4(0, 0, 0, 0);
    int last = piece.parts - 1;
#pragma unroll 1
    do {
        uint2 loaded[PARTS][GROUPS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const uint2* const from = partial + slots(last - i) * partial_place(1, 0, 0);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
                loaded[i][j] = last >= i ? __ldcg(from + partial_place(0, j, 0)) : make_uint2(0, 0);
        }
        if (last == piece.parts - 1) weigh();  // while they are under way
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const float* const weight = weights + max(last - i, 0) * 16 + lane / 4;
            const float low = weight[0], high = weight[8];
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                const float2 one = unpack_fp16(loaded[i][j].x), other = unpack_fp16(loaded[i][j].y);
                value[j].x = add_product(value[j].x, low, one.x), value[j].y = add_product(value[j].y, low, one.y);
                value[j].z = add_product(value[j].z, high, other.x), value[j].w = add_product(value[j].w, high, other.y);
            }
        }
        last -= PARTS;
    } while (last >= 0);
    __syncwarp();
    const float scale = output_scale(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool exists = row + 8 * half < piece.rows;
        const int own_row = exists ? row + 8 * half : 0;
        const RowEnd end = end_row(p, top[half], total[half], (piece.row_tile * ROWS + own_row) % p.heads, scale);
        if (exists && group == 0 && lane % 4 == 0) write_lse(p, piece, own_row, end.lse);
        const int64_t at =
            row_offset(piece, own_row, p.heads, p.out_token_stride, p.out_head_stride) + group * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const float4& own = value[j];
            const uint32_t two = pack_two(p, (half ? own.z : own.x) * end.factor, (half ? own.w : own.y) * end.factor);
            if (exists && p.out_type != TYPE_E4M3)
                *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + j * 8) = two;
            else if (exists)
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
// memory looks after that at the same address, so that the one whose arrival is the last in the counter's order sees all of
// them at its first look. It takes tickets until they are past the units; any lower ticket was taken by a warp that does
// that unit. A warp's ticket past the units is its departure; one that has waited in vain departs without. Each warp departs
// once for each part, and with the last departure the counter becomes zero for the next launch.
// Seeing all arrivals is what makes the parts readable; tickets and departures order nothing.
// Who merges a row changes nothing in its bits.
DEVICE void help_merge(const Params& p, const Piece& piece, float* weights) {
    constexpr int WARPS = CONSUMERS / 32;
    uint32_t* counter = static_cast<uint32_t*>(p.counters) + piece.counter;
    const int lane = threadIdx.x % 32;
    // As the registers allow: groups of columns where there are few parts, and groups times parts in flight beyond.
    constexpr int FEW_PARTS_GROUPS = ROWS < 64 ? 2 : (KV_E4M3 ? 4 : 8), MANY = 4 * FEW_PARTS_GROUPS;
    const int groups = piece.parts <= 4 ? FEW_PARTS_GROUPS : (piece.parts <= 16 && ROWS == 64 ? 2 : 1);
    const uint32_t units = (piece.rows + 15) / 16 * (COLUMN_GROUPS / groups);
    uint32_t before = 0, unit = 0;
    bool complete = false;
    // First for nothing, so that the code comes from DRAM while other parts are still written.
    for (bool rehearsal = true;; rehearsal = false) {
        Piece same = piece;
        asm volatile("" : "+r"(same.slot), "+r"(same.parts), "+r"(same.row_tile), "+r"(same.first_query));
        if (rehearsal) same.parts = same.rows = 0;
        // The next ticket is under way with this unit, but not where that would take another warp's only one.
        const bool early = units > piece.parts * WARPS;
        if (lane == 0 && !rehearsal && early) before = add_relaxed(counter, TICKET);
        if (groups == FEW_PARTS_GROUPS)
            merge_unit<FEW_PARTS_GROUPS, 4>(p, same, unit, weights);
        else if (groups == 2)
            merge_unit<2, MANY / 2>(p, same, unit, weights);
        else
            merge_unit<1, MANY>(p, same, unit, weights);
        if (lane == 0 && rehearsal) {
            const int64_t begin = clock64();
            do {
                complete = (load_acquire(counter) & ARRIVALS) == piece.parts;
            } while (!complete && clock64() - begin < HELP_CYCLES);
            before = add_relaxed(counter, complete ? TICKET : DEPARTURE);
        } else if (lane == 0 && !early) {
            before = add_relaxed(counter, TICKET);
        }
        unit = __shfl_sync(~0u, complete || lane > 0 ? before / TICKET : units, 0);
        if (unit >= units) break;
    }
    // Departures before this one.
    const int gone = static_cast<int>(before / TICKET - units + (before / DEPARTURE & DEPARTURES));
    if (lane == 0 && gone == piece.parts * WARPS - 1) *counter = 0;
}

// All pairs of which this CTA has written a part for others. The shared memory is MERGE_BYTES of each warp.
DEVICE void merge_shares(const Params& p, const Share& share, char* area) {
    uint32_t weights = shared_address(area) + threadIdx.x / 32 * MERGE_BYTES;
    asm volatile("" : "+r"(weights));  // not while registers are scarce
    Walker walker(p, share);
    Piece piece;
    while (walker.next(piece))
        if (!piece.whole() && piece.counter >= 0)
            help_merge(p, piece, static_cast<float*>(__cvta_shared_to_generic(weights)));
}

}  // namespace paged_mla_decode
