// Rows of the output and their log-sum-exp.
#pragma once
#include "softmax.cuh"

namespace context_attention {

using Output = float[VALUE_DIM / 2];

// Elements in front of this part of a row, whose heads have so many each: [tokens, splits, heads, elements].
DEVICE int64_t part_offset(const Params& p, int elements) {
    return SPLIT_KEYS ? static_cast<int64_t>(blockIdx.y) * (p.head_packs << p.packed_log2) * elements : 0;
}

// Where a row of a row tile lies.
struct RowAddress {
    int token, head;
    DEVICE RowAddress(const Params& p, const WorkTile& work, int row)
        : token(work.token + (row >> p.packed_log2)), head(work.head + (row & ((1 << p.packed_log2) - 1))) {}
};

// Outputs of the segments before the one that is computed, folded. They stay in shared memory, where each thread reads
// what it wrote: beside a segment's own there are not enough registers.
struct Folded {
    static constexpr int CELLS = VALUE_DIM / 8;
    // Of the thread's two rows: maxima, then sums; and the factors by which the segment that ended last is folded.
    float4 own_statistics = make_float4(-INFINITY, -INFINITY, 0.f, 0.f), own_factors;
    bool is_empty = true;
    float4* cells;

    DEVICE explicit Folded(SharedStorage& shared)
        : cells(reinterpret_cast<float4*>(shared.out[threadIdx.x / 32]) + threadIdx.x % 32) {
        statistics() = make_float4(-INFINITY, -INFINITY, 0.f, 0.f);
    }

    DEVICE float4& statistics() { return FOLDS_IN_SHARED ? cells[32 * CELLS] : own_statistics; }
    DEVICE float4& factors() { return FOLDS_IN_SHARED ? cells[32 * (CELLS + 1)] : own_factors; }

    // Ends a segment of the rows, so that the next begins; its output is folded later.
    DEVICE void close(Rows& rows, float scale_log2) {
        const float4 before = statistics();
        float maximum[2] = {before.x, before.y}, sum[2] = {before.z, before.w};
        segments::Fold fold[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float total = segments::segment_sum(rows.sum[i]);
            fold[i] = segments::fold_maximum(maximum[i], rows.maximum[i], scale_log2);
            sum[i] = fold[i](sum[i], total);
            rows.maximum[i] = -INFINITY;
            rows.sum[i] = 0.f;
        }
        statistics() = make_float4(maximum[0], maximum[1], sum[0], sum[1]);
        factors() = make_float4(fold[0].earlier, fold[0].next, fold[1].earlier, fold[1].next);
    }

    // Folds a segment's output into those of earlier ones.
    DEVICE void store(const Output& out) {
        const float4 by = factors();
#pragma unroll
        for (int i = 0; i < CELLS; ++i) {
            float4& cell = cells[32 * i];
            cell = folded(is_empty ? make_float4(0, 0, 0, 0) : cell, by, out, i);
        }
        is_empty = false;
    }

    // The last segment: `rows` and `out` become those of all.
    DEVICE void finish(float scale_log2, Rows& rows, Output& out) {
        close(rows, scale_log2);
        const float4 all = statistics();
        rows.maximum[0] = all.x, rows.maximum[1] = all.y, rows.sum[0] = all.z, rows.sum[1] = all.w;
        if (is_empty) return;  // the factors are 1
        const float4 by = factors();
#pragma unroll
        for (int i = 0; i < CELLS; ++i) {
            const float4 cell = folded(cells[32 * i], by, out, i);
            out[4 * i] = cell.x, out[4 * i + 1] = cell.y, out[4 * i + 2] = cell.z, out[4 * i + 3] = cell.w;
        }
    }

private:
    DEVICE static float4 folded(float4 before, float4 by, const Output& out, int i) {
        const segments::Fold first{by.x, by.y}, second{by.z, by.w};
        return make_float4(first(before.x, out[4 * i]), first(before.y, out[4 * i + 1]),
                           second(before.z, out[4 * i + 2]), second(before.w, out[4 * i + 3]));
    }
};

// Normalises the rows and writes their log-sum-exp; a row that sees no key has output 0.
DEVICE void finish_rows(const Params& p, const WorkTile& work, int row, float scale_log2, const Rows& rows,
                        Output& out) {
#if KV_E4M3
    const float output_scale = work.output_scale;
#else
    float output_scale = p.output_scale;
    if (p.output_scale_device != nullptr) output_scale *= *static_cast<const float*>(p.output_scale_device);
#endif
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const RowAddress at(p, work, row + 8 * i);
        const bool exists = at.token < work.q_len;
#if SEGMENTS
        const float* sink = p.sinks == nullptr || !exists ? nullptr : static_cast<const float*>(p.sinks) + at.head;
        const segments::Normalisation n =
            segments::normalise({rows.maximum[i], rows.sum[i]}, scale_log2, sink, output_scale, p.lse_sink);
        factor[i] = n.factor;
        const float lse = n.lse;
#else
        const bool sees = rows.maximum[i] > -INFINITY;
        float total = rows.sum[i];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const float top = rows.maximum[i] * scale_log2;
        float lse = top + log2f(total);  // -inf for a row that sees no key
        factor[i] = 1.f / total;
        if (p.sinks != nullptr && exists) {
            const float sink = static_cast<const float*>(p.sinks)[at.head] * 1.44269504f;
            const float highest = fmaxf(top, sink), anchor = highest == -INFINITY ? 0.f : highest;
            const float scale = exp2f(top - anchor);
            const float with_sink = fmaf(total, scale, exp2f(sink - anchor));
            factor[i] = scale / with_sink;
            if (p.lse_sink) lse = highest + log2f(with_sink);
        }
        factor[i] = sees ? factor[i] * output_scale : 0.f;
#endif
        if (p.lse != nullptr && exists && threadIdx.x % 4 == 0)
            static_cast<float*>(p.lse)[(work.q_begin + at.token) * p.lse_token_stride + at.head * p.lse_head_stride +
                                       part_offset(p, 1)] = lse * p.lse_scale;
    }
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i)
        out[i] = SEGMENTS ? segments::normalised(out[i], factor[i / 2 % 2]) : out[i] * factor[i / 2 % 2];
}

#if SPLIT_KEYS
// Writes the warp's 16 rows, in fp32, to the part of this split. `row` is the warp's first.
DEVICE void store_rows(const Params& p, SharedStorage&, const WorkTile& work, int row, const Output& out) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const RowAddress at(p, work, row + lane / 4 + 8 * half);
        if (at.token >= work.q_len) continue;
        float* base = static_cast<float*>(p.out) + (work.q_begin + at.token) * p.out_token_stride +
                      at.head * p.out_head_stride + part_offset(p, VALUE_DIM) + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 8; ++i)
            *reinterpret_cast<float2*>(base + 8 * i) = make_float2(out[4 * i + 2 * half], out[4 * i + 2 * half + 1]);
    }
}
#elif PRODUCER_WARPGROUPS == 2
// Transposes 4 x 4 registers over the four lanes of a row: register i of lane j becomes register j of lane i.
DEVICE void transpose_over_quad(uint32_t (&r)[4]) {
    const bool odd = threadIdx.x % 2, high = threadIdx.x / 2 % 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, odd ? r[i] : r[i + 1], 1);
        (odd ? r[i] : r[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, high ? r[i] : r[i + 2], 2);
        (high ? r[i] : r[i + 2]) = other;
    }
}

// Writes the warp's 16 rows in pieces of 16 bytes. `row` is the warp's first.
DEVICE void store_rows(const Params& p, SharedStorage&, const WorkTile& work, int row, const Output& out) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const RowAddress at(p, work, row + lane / 4 + 8 * half);
        const bool exists = at.token < work.q_len;
        uint16_t* base = static_cast<uint16_t*>(p.out) + (work.q_begin + at.token) * p.out_token_stride +
                         at.head * p.out_head_stride + lane % 4 * 8;
#pragma unroll
        for (int column = 0; column < VALUE_DIM; column += 32) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int cell = column / 2 + 4 * i + 2 * half;
                r[i] = MMA_FP16 ? pack_fp16(out[cell], out[cell + 1]) : pack_bf16(out[cell], out[cell + 1]);
            }
            transpose_over_quad(r);
            if (exists) *reinterpret_cast<uint4*>(base + column) = make_uint4(r[0], r[1], r[2], r[3]);
        }
    }
}
#else
// Writes the warp's 16 rows through its part of shared memory, in pieces of 16 bytes. `row` is the warp's first.
DEVICE void store_rows(const Params& p, SharedStorage& shared, const WorkTile& work, int row, const Output& out) {
    constexpr int PIECES = STAGED_COLUMNS / 8;
    const int lane = threadIdx.x % 32;
    const uint32_t staging = shared_address(shared.out[threadIdx.x / 32]);
    uint16_t* base = static_cast<uint16_t*>(p.out);
#pragma unroll
    for (int column = 0; column < VALUE_DIM; column += STAGED_COLUMNS) {
        __syncwarp();  // what was staged before has been read
#pragma unroll
        for (int j = 0; j < PIECES; j += 2) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int cell = column / 2 + 4 * j + 2 * i;
                r[i] = MMA_FP16 ? pack_fp16(out[cell], out[cell + 1]) : pack_bf16(out[cell], out[cell + 1]);
            }
            const int to = lane % 16, piece = j + lane / 16;
            stmatrix_x4(staging + (to * PIECES + (piece ^ (to % 8))) * 16, r);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * PIECES / 32; ++i) {
            const int cell = i * 32 + lane, from = cell / PIECES, piece = cell % PIECES;
            const RowAddress at(p, work, row + from);
            if (at.token < work.q_len) {
                const int64_t element = (work.q_begin + at.token) * p.out_token_stride + at.head * p.out_head_stride;
                *reinterpret_cast<uint4*>(base + element + column + piece * 8) =
                    load_shared_uint4(staging + (from * PIECES + (piece ^ (from % 8))) * 16);
            }
        }
    }
}
#endif

}  // namespace context_attention
