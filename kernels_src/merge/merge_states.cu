// Merges partial attention results over disjoint sets of keys by their log-sum-exp.
//
//   v [tokens, parts, heads, dim], s [tokens, parts, heads]   -+
//   v_other [tokens, heads, dim], s_other [tokens, heads]     -+--> out [tokens, heads, dim], lse [tokens, heads]
//   sinks [heads], added once                                 -+
//
// Neighbouring lanes of a warp own a row, a token and a head, and each of them VALUES neighbouring dims at a time. The
// parts are added in their order, v_other last, with weights relative to the largest of all: the bits depend on the
// parts' order alone. A part with LSE -inf saw no key; its values do not count, whatever they are. All parts of an
// element are read before it is written, by the same lane, and the LSEs of a row before its own is written, so out and
// lse may be v and s of the same row.
//
// Build: -DVALUES_TYPE=0 bf16|1 fp16|2 fp32 -DLOAD_FUNCTION=__ldcs|__ldcg (how states are read) -DKERNEL_NAME=symbol.

#include "../common/ptx.cuh"
#include "KernelConstants.h"
#include "MergeStatesParams.h"

using Params = MergeStatesParams;

namespace merge_states {

constexpr int THREADS = MERGE_THREADS;
constexpr int VALUES = MERGE_VALUES;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int BF16 = 0, FP16 = 1, FP32 = 2;
constexpr int ITEM_BYTES = VALUES_TYPE == FP32 ? 4 : 2;
constexpr int LOADS = VALUES * ITEM_BYTES / 16;
constexpr int PARTS_IN_FLIGHT = 4 / LOADS;  // of a row
constexpr int EXPONENTS_IN_FLIGHT = 8;

struct Part {
    const char* values;
    const float* lse;
};

DEVICE Part part_in_v(const Params& p, int index, int64_t token, int64_t head) {
    return {
        static_cast<const char*>(p.v) +
            (token * p.v_token_stride + index * p.v_part_stride + head * p.v_head_stride) * ITEM_BYTES,
        static_cast<const float*>(p.s) + token * p.s_token_stride + index * p.s_part_stride + head * p.s_head_stride};
}

DEVICE Part other_part(const Params& p, int64_t token, int64_t head) {
    return {static_cast<const char*>(p.v_other) +
                (token * p.v_other_token_stride + head * p.v_other_head_stride) * ITEM_BYTES,
            static_cast<const float*>(p.s_other) + token * p.s_other_token_stride + head * p.s_other_head_stride};
}

DEVICE Part part_of(const Params& p, int index, int64_t token, int64_t head) {
    return index < p.parts ? part_in_v(p, index, token, head) : other_part(p, token, head);
}

DEVICE void add_part(float (&sums)[VALUES], const uint4 (&data)[LOADS], float weight) {
#if VALUES_TYPE == 2
    const float* values = reinterpret_cast<const float*>(data);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
#else
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(data);
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i) {
        const float2 pair = VALUES_TYPE == FP16 ? unpack_fp16(pairs[i]) : unpack_bf16(pairs[i]);
        sums[2 * i] = fmaf(weight, pair.x, sums[2 * i]);
        sums[2 * i + 1] = fmaf(weight, pair.y, sums[2 * i + 1]);
    }
#endif
}

DEVICE void store(const Params& p, int64_t offset, const float (&values)[VALUES]) {
    if (p.out_type == FP32) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(p.out) + offset);
#pragma unroll
        for (int i = 0; i < VALUES / 4; ++i)
            to[i] = make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
        return;
    }
    uint32_t pairs[VALUES / 2];
#pragma unroll
    for (int i = 0; i < VALUES / 2; ++i)
        pairs[i] = p.out_type == FP16 ? pack_fp16(values[2 * i], values[2 * i + 1])
                                      : pack_bf16(values[2 * i], values[2 * i + 1]);
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + offset) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

struct Row {
    int64_t token, head;
};

DEVICE Row row_at(const Params& p, uint32_t row) {
    const uint32_t token = row / static_cast<uint32_t>(p.heads);
    return {token, row - token * static_cast<uint32_t>(p.heads)};
}

DEVICE void load_unit(uint4 (&data)[LOADS], const Part& part, int unit) {
    const uint4* from = reinterpret_cast<const uint4*>(part.values + unit * (VALUES * ITEM_BYTES));
#pragma unroll
    for (int j = 0; j < LOADS; ++j) data[j] = LOAD_FUNCTION(from + j);
}

// The largest exponent and the sum of powers of 2 relative to it, in the order of the parts behind the sink.
struct Total {
    float top, total;
    DEVICE explicit Total(float sink) : top(sink), total(0.f) {}
    DEVICE void raise(float exponent) { top = fmaxf(top, exponent); }
    DEVICE void begin(float sink) { total = sink == -INFINITY ? 0.f : exp2f(sink - top); }
    DEVICE void add(float exponent) {
        if (exponent != -INFINITY) total += exp2f(exponent - top);
    }
    DEVICE bool is_empty() const { return total == 0.f; }  // not <=: a NaN of a part stays a NaN
    DEVICE float normalise() const { return is_empty() ? 0.f : 1.f / total; }
    DEVICE float lse(const Params& p) const { return is_empty() ? -INFINITY : (top + log2f(total)) * p.lse_from_log2; }
};

DEVICE float sink_of(const Params& p, int64_t head) {
    return p.sinks ? __fmul_rn(static_cast<const float*>(p.sinks)[head], LOG2_E) : -INFINITY;
}

DEVICE void store_lse(const Params& p, const Row& row, int lane, float lse) {
    if (lane == 0 && p.lse)
        static_cast<float*>(p.lse)[row.token * p.lse_token_stride + row.head * p.lse_head_stride] = lse;
}

// A few parts, without a mask: the first units of some rows and all their LSEs are in flight together. No load or store
// is conditional, for the compiler would move loads behind the condition and with it behind the LSEs. Rows that do not
// fill the lanes of a CTA are left: returns the first of them.
template <int PARTS, bool HAS_OTHER>
DEVICE int64_t merge_few(const Params& p) {
    constexpr int ROWS = PARTS * LOADS <= 2 ? 2 : 1;
    const int lanes = 1 << p.lanes_log2, lane = threadIdx.x & (lanes - 1), step = THREADS >> p.lanes_log2;
    const int64_t rows = static_cast<int64_t>(p.tokens) * p.heads, batches = rows / (step * ROWS);
    for (int64_t batch = blockIdx.x; batch < batches; batch += gridDim.x) {
        Row row[ROWS];
        Part part[ROWS][PARTS];
        float exponents[ROWS][PARTS], sinks[ROWS], lse[ROWS];
        uint4 data[ROWS][PARTS][LOADS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            row[r] = row_at(p, static_cast<uint32_t>((batch * ROWS + r) * step) + (threadIdx.x >> p.lanes_log2));
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                part[r][i] = HAS_OTHER && i == PARTS - 1 ? other_part(p, row[r].token, row[r].head)
                                                         : part_in_v(p, i, row[r].token, row[r].head);
                load_unit(data[r][i], part[r][i], lane);
            }
        }
        __syncwarp();  // here and below: keeps the compiler from moving loads behind what waits for an LSE
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            sinks[r] = sink_of(p, row[r].head);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) exponents[r][i] = *part[r][i].lse;
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            Total all(sinks[r]);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) all.raise(exponents[r][i] = __fmul_rn(exponents[r][i], p.lse_to_log2));
            all.begin(sinks[r]);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) all.add(exponents[r][i]);
            const int64_t out_row = row[r].token * p.out_token_stride + row[r].head * p.out_head_stride;
            for (int unit = lane;;) {
                float sums[VALUES] = {};
#pragma unroll
                for (int i = 0; i < PARTS; ++i)
                    if (exponents[r][i] != -INFINITY) add_part(sums, data[r][i], exp2f(exponents[r][i] - all.top));
#pragma unroll
                for (int i = 0; i < VALUES; ++i) sums[i] *= all.normalise();
                store(p, out_row + unit * VALUES, sums);
                unit += lanes;
                if (unit >= p.units) break;
#pragma unroll
                for (int i = 0; i < PARTS; ++i) load_unit(data[r][i], part[r][i], unit);
            }
            lse[r] = all.lse(p);
        }
        __syncwarp();  // all lanes of the rows have read their LSEs, one of which may lie where their own go
#pragma unroll
        for (int r = 0; r < ROWS; ++r) store_lse(p, row[r], lane, lse[r]);
    }
    return batches * step * ROWS;
}

// Calls visit(exponent) for the parts of a row in order; the loads of a batch are in flight together.
template <class Visit>
DEVICE void for_each_exponent(const Params& p, int parts, int64_t token, int64_t head, Visit visit) {
#pragma unroll 1
    for (int base = 0; base < parts; base += EXPONENTS_IN_FLIGHT) {
        float lse[EXPONENTS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < EXPONENTS_IN_FLIGHT; ++i) lse[i] = *part_of(p, min(base + i, parts - 1), token, head).lse;
#pragma unroll
        for (int i = 0; i < EXPONENTS_IN_FLIGHT; ++i)
            if (base + i < parts) visit(__fmul_rn(lse[i], p.lse_to_log2));
    }
}

// Writes the row's output; returns its log-sum-exp.
DEVICE float merge_row(const Params& p, int64_t token, int64_t head, int lane) {
    const int parts = p.parts + (p.v_other ? 1 : 0);
    const float sink = sink_of(p, head);
    Total all(sink);
    for_each_exponent(p, parts, token, head, [&](float exponent) { all.raise(exponent); });
    all.begin(sink);
    for_each_exponent(p, parts, token, head, [&](float exponent) { all.add(exponent); });
    const int64_t out_row = token * p.out_token_stride + head * p.out_head_stride;
    for (int unit = lane; unit < p.units; unit += 1 << p.lanes_log2) {
        float sums[VALUES] = {};
        for (int base = 0; base < parts; base += PARTS_IN_FLIGHT) {
            uint4 data[PARTS_IN_FLIGHT][LOADS];
            float exponents[PARTS_IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < PARTS_IN_FLIGHT; ++i) {  // all loads of a batch are in flight together
                const Part part = part_of(p, min(base + i, parts - 1), token, head);
                exponents[i] = __fmul_rn(*part.lse, p.lse_to_log2);
                load_unit(data[i], part, unit);
            }
#pragma unroll
            for (int i = 0; i < PARTS_IN_FLIGHT; ++i)
                if (base + i < parts && exponents[i] != -INFINITY)
                    add_part(sums, data[i], exp2f(exponents[i] - all.top));
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[i] *= all.normalise();
        store(p, out_row + unit * VALUES, sums);
    }
    return all.lse(p);
}

// Any number of parts, any tokens: the rows from `first` on.
DEVICE void merge_many(const Params& p, int64_t first) {
    const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
    const int64_t rows = static_cast<int64_t>(p.tokens) * p.heads, step = THREADS >> p.lanes_log2;
    // All lanes of a warp go round equally often.
    for (int64_t base = first + blockIdx.x * step; base < rows; base += gridDim.x * step) {
        const int64_t index = base + (threadIdx.x >> p.lanes_log2);
        const Row row = row_at(p, static_cast<uint32_t>(index));
        const bool is_wanted = index < rows && (!p.mask || static_cast<const uint8_t*>(p.mask)[row.token]);
        const float lse = is_wanted ? merge_row(p, row.token, row.head, lane) : 0.f;
        __syncwarp();  // as above
        if (is_wanted) store_lse(p, row, lane, lse);
    }
}

}  // namespace merge_states

extern "C" __global__ void __launch_bounds__(merge_states::THREADS, MERGE_CTAS_PER_MULTIPROCESSOR)
    KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace merge_states;
    wait_for_previous_grid();
    allow_next_grid();  // its CTAs find room beside these, and wait for the end of this grid before they read
    int64_t done = 0;
    if (p.mask) {
    } else if (p.v_other) {
        if (p.parts == 1) done = merge_few<2, true>(p);
    } else if (p.parts == 2) {
        done = merge_few<2, false>(p);
    } else if (p.parts == PARTS_IN_FLIGHT) {
        done = merge_few<PARTS_IN_FLIGHT, false>(p);
    }
    merge_many(p, done);
}
