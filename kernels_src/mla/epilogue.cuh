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
// For which a warp waits for the other partials, to take part in the merge: a range of many output tiles takes so much
// longer than one of a single tile. Lists of sparse attention are equally long.
#if SPARSE
constexpr int MERGE_WAIT_CYCLES = 1 << 14;
#else
constexpr int MERGE_WAIT_CYCLES = 1 << 16;
#endif

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

// Where statistics of a row lie among those of 16 rows: those of rows 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 together.
DEVICE constexpr int row_place(int row) { return (row & ~15) + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2; }

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

static_assert(SCALE_COLUMNS % MERGE_COLUMNS == 0, "a block has one scale");

DEVICE constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }

// What a warp merges at a time: four rows, whose statistics lie together, of 2^blocks_log2 blocks of columns.
struct MergeUnit {
    int first_row, column;

    DEVICE MergeUnit(int unit, int blocks_log2) {
        const int units_log2 = log2_of(LATENT / MERGE_COLUMNS) - blocks_log2;  // of four rows
        const int four = unit >> units_log2;
        first_row = four / 4 * 16 + four % 4 * 2;
        column = ((unit & (1 << units_log2) - 1) << blocks_log2) * MERGE_COLUMNS;
    }

    // The row at a place among the four.
    DEVICE int row(int place) const { return first_row + place / 2 * 8 + place % 2; }
};

// Copies the splits [first, first + splits) of a unit to shared memory.
DEVICE void copy_splits(const Params& p, const SplitSet& set, const MergeUnit& unit, int blocks_log2, int first,
                        int splits, uint32_t values_to, uint32_t statistics_to) {
    const int lane = threadIdx.x % 32, piece = lane % 16, slot = set.slot(0);
    // From that of split 0, as SplitSet counts them.
    const auto slots = [&](int split) { return (first + split) * set.step - min(first + split, set.odd_first); };
    const auto copy = [](uint32_t to, const void* from, int64_t bytes) {
        cp_async_16(to, static_cast<const char*>(from) + bytes);
    };
    // In pieces of 16 bytes, four of each of a block's column groups.
    const uint2* const values = static_cast<const uint2*>(p.partial_out) +
                                partial_offset(slot, unit.column / 8 + piece / 4,
                                               unit.first_row / 16 * 32 + unit.first_row % 16 * 4 + piece % 4 * 2);
#pragma unroll 1
    for (int begin = lane / 16; begin < splits << blocks_log2; begin += 8)
#pragma unroll
        for (int i = begin; i < begin + 8; i += 2) {
            const int split = i >> blocks_log2, block = i & (1 << blocks_log2) - 1;
            if (split < splits)
                copy(values_to + i * BLOCK_BYTES + piece * 16, values,
                     partial_offset(slots(split), block * MERGE_COLUMNS / 8, 0) * sizeof(uint2));
        }
    if (lane < splits) {
        const int place = row_place(unit.first_row);
        const int64_t bytes = static_cast<int64_t>(slots(lane)) * STATISTICS_BYTES;
        const uint32_t to = statistics_to + lane * SPLIT_BYTES;
        copy(to, maxima_and_sums(p, slot) + place, bytes);
        copy(to + 16, maxima_and_sums(p, slot) + place + 2, bytes);
        copy(to + SPLIT_WEIGHTS, row_scales(p, slot, unit.column) + place, bytes);
    }
    cp_async_wait_all();
    __syncwarp();
}

// Merges a unit over the splits from the last to the first. The code is short rather than fast, because code that runs
// once is fetched from DRAM.
DEVICE void merge_unit(const Params& p, const WorkTile& work, int blocks_log2, int number, uint32_t area) {
    constexpr int AT_ONCE = 4, SPLITS_OF_LANE = MERGED_BLOCKS / 8;
    const int lane = threadIdx.x % 32, place = lane % 4;
    const MergeUnit unit(number, blocks_log2);
    const uint32_t statistics = area + MERGED_BLOCKS * BLOCK_BYTES, weights = statistics + SPLIT_WEIGHTS;
    const bool exists = unit.row(place) < work.rows;
    const int row = exists ? unit.row(place) : 0;
    const int64_t out_at = row_offset(work, row, p.heads, p.out_token_stride, p.out_head_stride) + unit.column;
    const int64_t row_at = exists ? out_at : -1;
    const float scale = output_scale(p);
    float top = LOWEST, total = 0.f;  // of the row at `place`, in eight lanes
    float4 value = make_float4(0, 0, 0, 0);  // two columns of the row at place lane / 4 % 2, and two of that at + 2
#pragma unroll 1
    for (int end = work.splits.count; end > 0;) {
        const int splits = min(end, MERGED_BLOCKS >> blocks_log2), first = end - splits;
        copy_splits(p, work.splits, unit, blocks_log2, first, splits, area, statistics);
        float2 own[SPLITS_OF_LANE];
        float maximum = LOWEST;
#pragma unroll
        for (int i = 0; i < SPLITS_OF_LANE; ++i) {
            const int split = lane / 4 + 8 * i;
            own[i] = make_float2(LOWEST, 0.f);
            if (split < splits) own[i] = load_shared_float2(statistics + split * SPLIT_BYTES + place * 8);
            maximum = fmaxf(maximum, own[i].x);
        }
        for (int step = 4; step < 32; step *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
        maximum = fmaxf(maximum, top);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < SPLITS_OF_LANE; ++i) {
            const int split = lane / 4 + 8 * i;
            const uint32_t at = weights + split * SPLIT_BYTES + place * 4;
            sum = add_product(sum, exp2_approximate(own[i].x - maximum), own[i].y);
            if (split < splits) store_shared_float(at, split_weight(own[i].x, maximum, load_shared_float(at)));
        }
        for (int step = 4; step < 32; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
        const float earlier = exp2_approximate(top - maximum);
        total = add_product(sum, earlier, total);
        top = maximum;
        const RowNormalisation norm = normalise_row(p, top, total, (work.row_tile * ROWS + row) % p.heads, scale);
        if (first == 0 && exists && unit.column == 0 && lane < 4) write_lse(p, work, row, norm.lse);
        __syncwarp();
        float factor[2], rescale[2];
        int64_t at[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int from = lane / 4 % 2 + half * 2;
            factor[half] = __shfl_sync(~0u, norm.factor, from);
            rescale[half] = __shfl_sync(~0u, earlier, from);
            at[half] = __shfl_sync(~0u, row_at, from);
        }
#pragma unroll 1
        for (int block = 0; block < 1 << blocks_log2; ++block) {
            value.x *= rescale[0], value.y *= rescale[0], value.z *= rescale[1], value.w *= rescale[1];
#pragma unroll 1
            for (int last = splits - 1; last >= 0; last -= AT_ONCE) {
                uint2 four[AT_ONCE];
                float low[AT_ONCE], high[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int split = max(last - i, 0);
                    const uint32_t weight = weights + split * SPLIT_BYTES + lane / 4 % 2 * 4;
                    low[i] = load_shared_float(weight), high[i] = load_shared_float(weight + 2 * 4);
                    four[i] = load_shared_uint2(area + ((split << blocks_log2) + block) * BLOCK_BYTES + lane * 8);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    if (last - i < 0) continue;
                    const float2 one = unpack_fp16(four[i].x), other = unpack_fp16(four[i].y);
                    value.x = add_product(value.x, low[i], one.x), value.y = add_product(value.y, low[i], one.y);
                    value.z = add_product(value.z, high[i], other.x), value.w = add_product(value.w, high[i], other.y);
                }
            }
            if (first > 0) break;  // there is one block
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t two =
                    pack_two(p, (half ? value.z : value.x) * factor[half], (half ? value.w : value.y) * factor[half]);
                const int64_t to = at[half] + block * MERGE_COLUMNS + lane / 8 * 8 + lane % 4 * 2;
                if (at[half] >= 0 && p.out_type != TYPE_E4M3)
                    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + to) = two;
                else if (at[half] >= 0)
                    *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + to) = two;
            }
            value = make_float4(0, 0, 0, 0);
        }
        __syncwarp();  // what was copied has been read
        end = first;
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
DEVICE void merge_output_tile(const Params& p, const WorkTile& work, uint32_t area) {
    constexpr int WARPS = CONSUMERS / 32;
    uint32_t* counter = static_cast<uint32_t*>(p.counters) + work.splits.counter;
    const int lane = threadIdx.x % 32;
    // As many blocks, of one scale, as there is room for with all their splits, but enough units for all warps.
    constexpr int MOST_LOG2 = log2_of(SCALE_COLUMNS / MERGE_COLUMNS);
    static_assert(4 << MOST_LOG2 <= MERGED_BLOCKS);
    const int blocks_log2 = work.splits.count <= 4                                 ? MOST_LOG2
                            : ROWS == 64 && work.splits.count <= MERGED_BLOCKS / 2 ? min(MOST_LOG2, 1)
                                                                                   : 0;
    static_assert(MLA_MAX_SPLITS * WARPS <= DEPARTURES &&
                      ROWS / 4 * (LATENT / MERGE_COLUMNS) + MLA_MAX_SPLITS * WARPS <= ~0u / TICKET,
                  "bits of a counter");
    const uint32_t units = (work.rows + 15) / 16 * 4 * (LATENT / MERGE_COLUMNS >> blocks_log2);
    uint32_t before = 0, unit = 0;
    bool complete = false;
    if (lane == 0) {
        const int64_t begin = clock64();
        do {
            complete = (load_acquire(counter) & ARRIVALS) == work.splits.count;
        } while (!complete && clock64() - begin < MERGE_WAIT_CYCLES);
        before = atomic_add_relaxed(counter, complete ? TICKET : DEPARTURE);
    }
    // Takes the next ticket while a unit is merged, unless that would take another warp's only one.
    const bool early = units > work.splits.count * WARPS;
#pragma unroll 1
    for (;;) {
        unit = __shfl_sync(~0u, complete || lane > 0 ? before / TICKET : units, 0);
        if (unit >= units) break;
        if (lane == 0 && early) before = atomic_add_relaxed(counter, TICKET);
        merge_unit(p, work, blocks_log2, unit, area);
        if (lane == 0 && !early) before = atomic_add_relaxed(counter, TICKET);
    }
    // Departures before this one.
    const int departed = static_cast<int>(before / TICKET - units + (before / DEPARTURE & DEPARTURES));
    if (lane == 0 && departed == work.splits.count * WARPS - 1) *counter = 0;
}

// Merges all output tiles of which this CTA wrote a partial for others. `area` is MERGE_BYTES of shared memory for each
// warp.
DEVICE void merge_range(const Params& p, const WorkRange& range, char* area) {
    uint32_t own = shared_address(area) + threadIdx.x / 32 * MERGE_BYTES;
    asm volatile("" : "+r"(own));  // computed here, not while registers are scarce
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work))
        if (!work.whole() && work.splits.counter >= 0) merge_output_tile(p, work, own);
}

}  // namespace paged_mla_decode
