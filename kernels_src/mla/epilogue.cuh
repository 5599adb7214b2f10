// CTA epilogue: normalise rows, or write and merge split-KV partials.
#pragma once
#include "scheduler.cuh"

namespace paged_mla_decode {

constexpr int CONSUMER_BARRIER = 1;

// Bit fields of a counter: arrivals (partials that are written), departures (warps that are done with the output tile),
// and tickets for units of its merge.
constexpr uint32_t ARRIVAL = 1;
constexpr uint32_t ARRIVALS = (1 << 9) - 1;
constexpr uint32_t DEPARTURE = 1 << 9;
constexpr uint32_t DEPARTURES = (1 << 12) - 1;
constexpr uint32_t TICKET = 1 << 21;
constexpr int MERGE_WAIT_CYCLES = 1 << 14;  // for which a warp waits for the other partials, to take part in the merge

// How a row of unnormalised outputs with this maximum and sum becomes a row of the output.
struct RowNormalisation {
    float factor, lse;
};

DEVICE RowNormalisation normalise_row(const Params& p, float maximum, float sum, int head, float output_scale) {
    float top = maximum, total = sum;
    if (p.sinks != nullptr) {
        const float sink = static_cast<const float*>(p.sinks)[head] * LOG2_E;
        top = fmaxf(maximum, sink);
        total = __fmaf_rn(sum, exp2_approximate(maximum - top), exp2_approximate(sink - top));
    }
    const bool none = maximum == LOWEST;  // no visible key
    RowNormalisation norm;
    norm.factor = none ? 0.f : __fdividef(output_scale * exp2_approximate(maximum - top), total);
    norm.lse = total == 0.f ? -INFINITY : top + __log2f(total);
#if SPARSE
    if (!p.lse_sink) norm.lse = none ? -INFINITY : maximum + __log2f(sum);
#endif
    return norm;
}

DEVICE float output_scale(const Params& p) {
    const float* factor = static_cast<const float*>(p.output_scale_device);
    return factor == nullptr ? p.output_scale : p.output_scale * *factor;
}

DEVICE void write_lse(const Params& p, const WorkTile& work, int row, float lse) {
#if SPARSE
    lse *= p.lse_from_log2;
#endif
    if (p.lse != nullptr)
        static_cast<float*>(p.lse)[row_offset(work, row, p.heads, p.lse_token_stride, p.lse_head_stride)] = lse;
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

// A partial is fp16, four numbers for each of ROWS * 2 lanes and each group of 8 columns: two neighbouring columns of
// row lane / 4 (of 16 for each 32 lanes), and those of row + 8.
constexpr int COLUMN_GROUPS = LATENT / 8;

DEVICE int64_t partial_offset(int slot, int group, int lane) {
    return (static_cast<int64_t>(slot) * COLUMN_GROUPS + group) * (ROWS * 2) + lane;
}

// Each row of a partial also has its maximum, its sum, and for each SCALE_COLUMNS columns (those of a row that one warp
// holds) a power of two by which the fp16 numbers are to be multiplied.
constexpr int SCALE_COLUMNS = ROWS < 64 ? 64 : (KV_E4M3 ? OUTPUT_COLUMNS / 8 : OUTPUT_COLUMNS / 2);
constexpr int STATISTICS_BYTES = ROWS * (2 + LATENT / SCALE_COLUMNS) * sizeof(float);  // of a slot
static_assert(LATENT / SCALE_COLUMNS <= MLA_MAX_ROW_SCALES, "the workspace has room for as many");

DEVICE char* statistics_of(const Params& p, int slot) {
    return static_cast<char*>(p.partial_statistics) + static_cast<int64_t>(slot) * STATISTICS_BYTES;
}

DEVICE float2* maxima_and_sums(const Params& p, int slot) { return reinterpret_cast<float2*>(statistics_of(p, slot)); }

// Of the rows, for the columns from `column` on.
DEVICE float* row_scales(const Params& p, int slot, int column) {
    return reinterpret_cast<float*>(maxima_and_sums(p, slot) + ROWS) + column / SCALE_COLUMNS * ROWS;
}

// A row's power of two and its inverse, from the sum of magnitudes of SCALE_COLUMNS columns. The sum bounds the largest
// magnitude and is quicker to compute, and fp16 has exponents to spare: the scaled bound is 2^14 to 2^15. An infinite
// sum gives a scale that no finite number exceeds. If all numbers are below 2^-100, bits below 2^-125 are lost.
struct RowScale {
    float scale, inverse;

    DEVICE explicit RowScale(float magnitudes) {
        constexpr uint32_t MIN_BIASED = 127 + 14 - 100;
        const uint32_t biased = max(__float_as_uint(magnitudes) >> 23, MIN_BIASED);
        scale = __uint_as_float((biased - 14) << 23);
        inverse = __uint_as_float((2 * 127 + 14 - biased) << 23);
    }
    DEVICE uint32_t pack(float low, float high) const { return pack_fp16(low * inverse, high * inverse); }
};

// ---------------------------------------------------------------- merge

// Products are summed in the same order and with the same rounding wherever splits are merged.
DEVICE float add_product(float sum, float factor, float value) { return __fmaf_rn(factor, value, sum); }

// The factor of the fp16 numbers of a row of one split.
DEVICE float split_weight(float maximum, float top, float scale) {
    return __fmul_rn(exp2_approximate(maximum - top), scale);
}

template <class T>
DEVICE const T* offset_bytes(const T* from, int64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + bytes);
}

// A warp merges a unit: 16 rows of GROUPS column groups, over the splits from the last to the first, SPLITS of them in
// flight. A work tile with no rows and no splits runs through all the code and reads and writes nothing.
template <int GROUPS, int SPLITS>
DEVICE void merge_unit(const Params& p, const WorkTile& work, int unit, float* weights) {
    constexpr int STATISTICS = ROWS < 64 ? 4 : 8;  // of every fourth split, by each of the four lanes of a row
    const int lane = threadIdx.x % 32;
    const int warp_row = unit / (COLUMN_GROUPS / GROUPS), group = unit % (COLUMN_GROUPS / GROUPS) * GROUPS;
    const int row = warp_row * 16 + lane / 4;
    const uint2* partial = static_cast<const uint2*>(p.partial_out);
    partial += partial_offset(work.splits.slot(0), group, warp_row * 32 + lane);
    const float2* statistics = maxima_and_sums(p, work.splits.slot(0)) + row;
    const float* scales = row_scales(p, work.splits.slot(0), group * 8) + row;
    // Keeps the compiler from recomputing each address from the parameters.
    asm volatile("" : "+l"(partial), "+l"(statistics), "+l"(scales));
    // Slot offsets from that of split 0, as SplitSet counts them.
    const int step = work.splits.step, shift = work.splits.odd_first;
    const auto slots = [&](int split) { return static_cast<int64_t>(split * step - min(split, shift)); };
    float top[2] = {LOWEST, LOWEST}, total[2] = {};
    const auto weigh = [&] {
        float2 own[STATISTICS][2];
        float split_scale[STATISTICS][2];
#pragma unroll 1
        for (bool again = false;; again = true) {
            int base = 0;
#pragma unroll 1
            do {
                if (!again || work.splits.count > STATISTICS * 4)
#pragma unroll
                    for (int i = 0; i < STATISTICS; ++i) {
                        const int split = base + 4 * i + lane % 4;
                        const int64_t at = slots(split) * STATISTICS_BYTES;
                        for (int half = 0; half < 2; ++half) {
                            own[i][half] = make_float2(LOWEST, 0.f);
                            split_scale[i][half] = 0.f;
                            if (split >= work.splits.count) continue;
                            own[i][half] = __ldcg(offset_bytes(statistics + half * 8, at));
                            split_scale[i][half] = __ldcg(offset_bytes(scales + half * 8, at));
                        }
                    }
                if (again) {
#pragma unroll
                    for (int i = 0; i < STATISTICS; ++i)
                        for (int half = 0; half < 2; ++half)
                            weights[(base + 4 * i + lane % 4) * 16 + lane / 4 + half * 8] =
                                split_weight(own[i][half].x, top[half], split_scale[i][half]);
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
            } while (base < work.splits.count);
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
    int last = work.splits.count - 1;
#pragma unroll 1
    do {
        uint2 loaded[SPLITS][GROUPS];
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
            const uint2* const from = partial + slots(last - i) * partial_offset(1, 0, 0);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
                loaded[i][j] = last >= i ? __ldcg(from + partial_offset(0, j, 0)) : make_uint2(0, 0);
        }
        if (last == work.splits.count - 1) weigh();  // while they are in flight
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
            const float* const weight = weights + max(last - i, 0) * 16 + lane / 4;
            const float low = weight[0], high = weight[8];
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                const float2 one = unpack_fp16(loaded[i][j].x), other = unpack_fp16(loaded[i][j].y);
                value[j].x = add_product(value[j].x, low, one.x), value[j].y = add_product(value[j].y, low, one.y);
                value[j].z = add_product(value[j].z, high, other.x),
                value[j].w = add_product(value[j].w, high, other.y);
            }
        }
        last -= SPLITS;
    } while (last >= 0);
    __syncwarp();
    const float scale = output_scale(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool exists = row + 8 * half < work.rows;
        const int own_row = exists ? row + 8 * half : 0;
        const RowNormalisation norm =
            normalise_row(p, top[half], total[half], (work.row_tile * ROWS + own_row) % p.heads, scale);
        if (exists && group == 0 && lane % 4 == 0) write_lse(p, work, own_row, norm.lse);
        const int64_t at =
            row_offset(work, own_row, p.heads, p.out_token_stride, p.out_head_stride) + group * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const float4& own = value[j];
            const uint32_t two =
                pack_two(p, (half ? own.z : own.x) * norm.factor, (half ? own.w : own.y) * norm.factor);
            if (exists && p.out_type != TYPE_E4M3)
                *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + j * 8) = two;
            else if (exists)
                *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + at + j * 8) = two;
        }
    }
}

// Publishes that this CTA's partial of that counter's output tile is written. All consumers met at a barrier after
// writing it.
DEVICE void arrive(const Params& p, int counter) {
    if (threadIdx.x == 0) atomic_add_acq_rel(static_cast<uint32_t*>(p.counters) + counter, ARRIVAL);
}

// Merges an output tile together with other CTAs: each warp takes units until none is left. A warp whose output tile is
// incomplete waits for MERGE_WAIT_CYCLES and then leaves: no wait depends on what else runs. The merge still happens,
// exactly once, before the counter returns to zero: the thread that arrives for its CTA reads the same address
// afterwards, so that the CTA whose arrival is last sees all arrivals at its first look. It takes tickets until they
// exceed the units; every lower ticket was taken by a warp that merges that unit. A warp's ticket beyond the units is
// its departure; a warp that waited in vain departs without one. Each warp departs once for each partial, and the last
// departure resets the counter for the next launch. Seeing all arrivals makes the partials readable; tickets and
// departures order nothing. The bits of a row do not depend on which warp merges it.
DEVICE void merge_output_tile(const Params& p, const WorkTile& work, float* weights) {
    constexpr int WARPS = CONSUMERS / 32;
    uint32_t* counter = static_cast<uint32_t*>(p.counters) + work.splits.counter;
    const int lane = threadIdx.x % 32;
    // As many as registers allow: column groups where there are few splits; column groups times splits in flight
    // otherwise.
    constexpr int FEW_SPLITS_GROUPS = ROWS < 64 ? 2 : (KV_E4M3 ? 4 : 8), MANY = 4 * FEW_SPLITS_GROUPS;
    const int groups = work.splits.count <= 4 ? FEW_SPLITS_GROUPS : (work.splits.count <= 16 && ROWS == 64 ? 2 : 1);
    const uint32_t units = (work.rows + 15) / 16 * (COLUMN_GROUPS / groups);
    uint32_t before = 0, unit = 0;
    bool complete = false;
    // The first pass is a warm-up that fetches the code from DRAM while other partials are still being written.
    for (bool warmup = true;; warmup = false) {
        WorkTile same = work;
        asm volatile("" : "+r"(same.splits.base), "+r"(same.splits.count), "+r"(same.row_tile), "+r"(same.q_begin));
        if (warmup) same.splits.count = same.rows = 0;
        // Takes the next ticket while this unit is merged, unless that would take another warp's only one.
        const bool early = units > work.splits.count * WARPS;
        if (lane == 0 && !warmup && early) before = atomic_add_relaxed(counter, TICKET);
        if (groups == FEW_SPLITS_GROUPS)
            merge_unit<FEW_SPLITS_GROUPS, 4>(p, same, unit, weights);
        else if (groups == 2)
            merge_unit<2, MANY / 2>(p, same, unit, weights);
        else
            merge_unit<1, MANY>(p, same, unit, weights);
        if (lane == 0 && warmup) {
            const int64_t begin = clock64();
            do {
                complete = (load_acquire(counter) & ARRIVALS) == work.splits.count;
            } while (!complete && clock64() - begin < MERGE_WAIT_CYCLES);
            before = atomic_add_relaxed(counter, complete ? TICKET : DEPARTURE);
        } else if (lane == 0 && !early) {
            before = atomic_add_relaxed(counter, TICKET);
        }
        unit = __shfl_sync(~0u, complete || lane > 0 ? before / TICKET : units, 0);
        if (unit >= units) break;
    }
    // Departures before this one.
    const int departed = static_cast<int>(before / TICKET - units + (before / DEPARTURE & DEPARTURES));
    if (lane == 0 && departed == work.splits.count * WARPS - 1) *counter = 0;
}

// Merges all output tiles of which this CTA wrote a partial for others. `area` is MERGE_BYTES of shared memory for each
// warp.
DEVICE void merge_range(const Params& p, const WorkRange& range, char* area) {
    uint32_t weights = shared_address(area) + threadIdx.x / 32 * MERGE_BYTES;
    asm volatile("" : "+r"(weights));  // computed here, not while registers are scarce
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work))
        if (!work.whole() && work.splits.counter >= 0)
            merge_output_tile(p, work, static_cast<float*>(__cvta_shared_to_generic(weights)));
}

}  // namespace paged_mla_decode
