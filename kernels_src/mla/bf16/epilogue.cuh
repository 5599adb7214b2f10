// Epilogue of the bf16 kernel: stores rows or partials from the accumulators of a consumer warpgroup.
#pragma once
#include "../warpgroups.cuh"
#include "../epilogue.cuh"

namespace paged_mla_decode {

// How the thread's two rows become rows of the output.
struct OutputRows {
    float factor[2];
    bool exists[2];
    int64_t offset[2];  // of the first column

    DEVICE OutputRows(const Params& p, const WorkTile& work, int row, int column, const float (&maximum)[2],
                      const float (&sum)[2]) {
        const float scale = output_scale(p);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int wanted = row + half * 8, own = min(wanted, work.rows - 1);
            const RowNormalisation norm =
                normalise_row(p, maximum[half], sum[half], (work.row_tile * ROWS + own) % p.heads, scale);
            exists[half] = wanted < work.rows;
            if (exists[half] && column == 0 && threadIdx.x % 4 == 0) write_lse(p, work, own, norm.lse);
            factor[half] = norm.factor;
            offset[half] = row_offset(work, own, p.heads, p.out_token_stride, p.out_head_stride) + column;
        }
    }
};

// The thread has rows lane / 4 and + 8 of the warp's 16. Four lanes hold 8 neighbouring columns, and exchange so that
// each has 8 columns of its own.
template <int TYPE>
DEVICE void store_rows(const Params& p, const OutputRows& rows, const float (&out)[HALF_COLUMNS / 2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 8; j += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = pack_two<TYPE>(out[4 * (j + i) + 2 * half] * rows.factor[half],
                                          out[4 * (j + i) + 2 * half + 1] * rows.factor[half]);
            // Lane l of four collects the pairs of group j + l, in two rounds of exchanges.
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
            if (!rows.exists[half]) continue;
            const int64_t at = rows.offset[half] + 8 * (j + lane % 4);
            if (TYPE != TYPE_E4M3)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            else
                *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) + at) =
                    make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
    }
}

// The same for 16-bit outputs through shared memory, 1024 bytes per warp: fewer instructions, which are fetched from
// DRAM.
template <int TYPE>
DEVICE void store_rows_staged(const Params& p, const OutputRows& rows, const float (&out)[HALF_COLUMNS / 2],
                              uint32_t stage) {
    const int lane = threadIdx.x % 32;
    // A row of 32 columns has 4 chunks of 16 bytes; the swizzle keeps 8 rows free of bank conflicts.
    const auto offset = [&](int row, int chunk) { return stage + row * 64 + (chunk ^ (row / 2 % 4)) * 16; };
    const uint32_t to[2] = {offset(lane % 16, lane / 16), offset(lane % 16, 2 + lane / 16)};
    const uint32_t from[2] = {offset(lane / 4, lane % 4), offset(lane / 4 + 8, lane % 4)};
    uint16_t* target[2];
    for (int half = 0; half < 2; ++half)
        target[half] = static_cast<uint16_t*>(p.out) + rows.offset[half] + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < HALF_COLUMNS / 8; j += 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* const own = &out[4 * (j + 2 * i)];
            const uint32_t four[4] = {pack_two<TYPE>(own[0] * rows.factor[0], own[1] * rows.factor[0]),
                                      pack_two<TYPE>(own[2] * rows.factor[1], own[3] * rows.factor[1]),
                                      pack_two<TYPE>(own[4] * rows.factor[0], own[5] * rows.factor[0]),
                                      pack_two<TYPE>(own[6] * rows.factor[1], own[7] * rows.factor[1])};
            stmatrix_x4(to[i], four);
        }
        __syncwarp();
        uint4 row[2];
        for (int half = 0; half < 2; ++half) row[half] = load_shared_uint4(from[half]);
        __syncwarp();
        for (int half = 0; half < 2; ++half)
            if (rows.exists[half]) *reinterpret_cast<uint4*>(target[half] + j * 8) = row[half];
    }
}

// One instance per output type: code that runs once is fetched from DRAM, and straight-line code comes faster. `stage`
// is the warp's 1024 bytes of shared memory.
DEVICE void store_rows(const Params& p, const WorkTile& work, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                       const float (&maximum)[2], const float (&sum)[2], uint32_t stage) {
    if (PADDED && column >= LATENT) return;
    const OutputRows rows(p, work, row, column, maximum, sum);
    if (p.out_type == TYPE_E4M3)
        store_rows<TYPE_E4M3>(p, rows, out);
    else if (p.out_type == TYPE_BF16)
        store_rows_staged<TYPE_BF16>(p, rows, out, stage);
    else
        store_rows_staged<TYPE_FP16>(p, rows, out, stage);
}

// Of the thread's two rows.
struct RowScales {
    RowScale low, high;

    DEVICE explicit RowScales(const float (&out)[HALF_COLUMNS / 2])
        : low(magnitudes_of_row<0>(out)), high(magnitudes_of_row<1>(out)) {}

private:
    template <int HALF>
    DEVICE static float magnitudes_of_row(const float (&out)[HALF_COLUMNS / 2]) {
        float partial[4] = {};
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 2; j += 4)
            for (int i = 0; i < 2; ++i) partial[j / 4 % 2 * 2 + i] += fabsf(out[j + 2 * HALF + i]);
        float sum = partial[0] + partial[1] + (partial[2] + partial[3]);
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        return sum;
    }
};

DEVICE void store_partial(const Params& p, const WorkTile& work, int row, int column,
                          const float (&out)[HALF_COLUMNS / 2], const RowScales& own, const float (&maximum)[2],
                          const float (&sum)[2]) {
    if (row / 16 * 16 >= work.rows || (PADDED && column >= LATENT)) return;
    const int slot = work.splits.slot(work.splits.index);
    uint2* target = static_cast<uint2*>(p.partial_out) + partial_offset(slot, column / 8, threadIdx.x % WARPGROUP);
#pragma unroll
    for (int j = 0; j < HALF_COLUMNS / 2; j += 4)
        target[j / 4 * WARPGROUP] = make_uint2(own.low.pack(out[j], out[j + 1]), own.high.pack(out[j + 2], out[j + 3]));
    if (threadIdx.x % 4 > 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int place = row_place(row + half * 8);
        row_scales(p, slot, column)[place] = half ? own.high.scale : own.low.scale;
        if (column == 0) maxima_and_sums(p, slot)[place] = make_float2(maximum[half], sum[half]);
    }
}

// Rounds two neighbouring columns to fp16, as a partial would hold them, and multiplies them with the split's weight.
DEVICE void weigh_rounded(const RowScale& row, float weight, float& first, float& second) {
    const float2 two = unpack_fp16(row.pack(first, second));
    first = add_product(0.f, weight, two.x), second = add_product(0.f, weight, two.y);
}

// Computes in registers what merge_unit makes of an output tile's splits, all of which this CTA has computed, the last
// one in the thread's registers.
DEVICE void fold_splits(const Params& p, const WorkTile& work, int row, int column, float (&out)[HALF_COLUMNS / 2],
                        const RowScales& own, float (&maximum)[2], float (&sum)[2]) {
    if (PADDED && column >= LATENT) return;
    const int before = work.splits.count - 1, slot = work.splits.slot(0);
    float weight[2][FOLDED_SPLITS - 1], top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 statistics[FOLDED_SPLITS];
        float scale[FOLDED_SPLITS - 1];
        top[half] = LOWEST;
#pragma unroll
        for (int i = 0; i < FOLDED_SPLITS; ++i) {
            statistics[i] = make_float2(LOWEST, 0.f);
            if (i < before) {
                statistics[i] = __ldcg(maxima_and_sums(p, slot + i) + row_place(row + half * 8));
                scale[i] = __ldcg(row_scales(p, slot + i, column) + row_place(row + half * 8));
            } else if (i == before) {
                statistics[i] = make_float2(maximum[half], sum[half]);
            }
            top[half] = fmaxf(top[half], statistics[i].x);
        }
        float total[FOLDED_SPLITS];
#pragma unroll
        for (int i = 0; i < FOLDED_SPLITS; ++i)
            total[i] = add_product(0.f, exp2_approximate(statistics[i].x - top[half]), statistics[i].y);
        sum[half] = __fadd_rn(__fadd_rn(total[0], total[1]), __fadd_rn(total[2], total[3]));
#pragma unroll
        for (int i = 0; i < FOLDED_SPLITS - 1; ++i)
            weight[half][i] = split_weight(statistics[i].x, top[half], scale[i]);
    }
    const float own_low = split_weight(maximum[0], top[0], own.low.scale);
    const float own_high = split_weight(maximum[1], top[1], own.high.scale);
#pragma unroll
    for (int j = 0; j < HALF_COLUMNS / 2; j += 4) {
        weigh_rounded(own.low, own_low, out[j], out[j + 1]);
        weigh_rounded(own.high, own_high, out[j + 2], out[j + 3]);
    }
    for (int half = 0; half < 2; ++half) maximum[half] = top[half];
#pragma unroll 1
    for (int i = before - 1; i >= 0; --i) {
        const uint2* partial = static_cast<const uint2*>(p.partial_out);
        partial += partial_offset(slot + i, column / 8, threadIdx.x % WARPGROUP);
        const float low = i == 2 ? weight[0][2] : (i == 1 ? weight[0][1] : weight[0][0]);
        const float high = i == 2 ? weight[1][2] : (i == 1 ? weight[1][1] : weight[1][0]);
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 8; ++j) {
            const uint2 four = __ldcg(partial + j * WARPGROUP);
            const float2 one = unpack_fp16(four.x), other = unpack_fp16(four.y);
            out[4 * j] = add_product(out[4 * j], low, one.x);
            out[4 * j + 1] = add_product(out[4 * j + 1], low, one.y);
            out[4 * j + 2] = add_product(out[4 * j + 2], high, other.x);
            out[4 * j + 3] = add_product(out[4 * j + 3], high, other.y);
        }
    }
}

}  // namespace paged_mla_decode
