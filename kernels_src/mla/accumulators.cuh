// What leaves the accumulators of a consumer warpgroup.
#pragma once
#include "layout.cuh"
#include "output.cuh"

namespace paged_mla_decode {

// What becomes of the thread's two rows.
struct RowEnds {
    float factor[2];
    bool exists[2];
    int64_t place[2];  // of the first column

    DEVICE RowEnds(const Params& p, const Piece& piece, int row, int column, const float (&maximum)[2],
                   const float (&sum)[2]) {
        const float scale = output_scale(p);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int wanted = row + half * 8, own = min(wanted, piece.rows - 1);
            const RowEnd end = end_row(p, maximum[half], sum[half], (piece.row_tile * ROWS + own) % p.heads, scale);
            exists[half] = wanted < piece.rows;
            if (exists[half] && column == 0 && threadIdx.x % 4 == 0) write_lse(p, piece, own, end.lse);
            factor[half] = end.factor;
            place[half] = row_offset(piece, own, p.heads, p.out_token_stride, p.out_head_stride) + column;
        }
    }
};

// Rows lane / 4 and 8 more of the warp's 16; four lanes hold 8 neighbouring columns, and swap so that each has 8 of its own.
template <int TYPE>
DEVICE void write_rows(const Params& p, const RowEnds& ends, const float (&out)[HALF_COLUMNS / 2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 8; j += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = pack_two<TYPE>(out[4 * (j + i) + 2 * half] * ends.factor[half],
                                          out[4 * (j + i) + 2 * half + 1] * ends.factor[half]);
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
            if (!ends.exists[half]) continue;
            const int64_t at = ends.place[half] + 8 * (j + lane % 4);
            if (TYPE != TYPE_E4M3)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            else
                *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) + at) =
                    make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
    }
}

// The same of 16-bit numbers by way of shared memory, 1024 bytes a warp: fewer instructions, and they come from DRAM.
template <int TYPE>
DEVICE void write_rows_staged(const Params& p, const RowEnds& ends, const float (&out)[HALF_COLUMNS / 2], uint32_t stage) {
    const int lane = threadIdx.x % 32;
    // Of 32 columns a row has 4 chunks of 16 bytes; no two of 8 rows' are in one bank.
    const auto place = [&](int row, int chunk) { return stage + row * 64 + (chunk ^ (row / 2 % 4)) * 16; };
    const uint32_t to[2] = {place(lane % 16, lane / 16), place(lane % 16, 2 + lane / 16)};
    const uint32_t from[2] = {place(lane / 4, lane % 4), place(lane / 4 + 8, lane % 4)};
    uint16_t* target[2];
    for (int half = 0; half < 2; ++half) target[half] = static_cast<uint16_t*>(p.out) + ends.place[half] + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < HALF_COLUMNS / 8; j += 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* const own = &out[4 * (j + 2 * i)];
            const uint32_t four[4] = {pack_two<TYPE>(own[0] * ends.factor[0], own[1] * ends.factor[0]),
                                      pack_two<TYPE>(own[2] * ends.factor[1], own[3] * ends.factor[1]),
                                      pack_two<TYPE>(own[4] * ends.factor[0], own[5] * ends.factor[0]),
                                      pack_two<TYPE>(own[6] * ends.factor[1], own[7] * ends.factor[1])};
            store_matrix_x4(to[i], four);
        }
        __syncwarp();
        uint4 row[2];
        for (int half = 0; half < 2; ++half) row[half] = load_shared_16_bytes(from[half]);
        __syncwarp();
        for (int half = 0; half < 2; ++half)
            if (ends.exists[half]) *reinterpret_cast<uint4*>(target[half] + j * 8) = row[half];
    }
}

// For each type of output apart: what runs once comes from DRAM, and in a row. `stage`: the warp's 1024 bytes of shared memory.
DEVICE void write_rows(const Params& p, const Piece& piece, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                       const float (&maximum)[2], const float (&sum)[2], uint32_t stage) {
    const RowEnds ends(p, piece, row, column, maximum, sum);
    if (p.out_type == TYPE_E4M3)
        write_rows<TYPE_E4M3>(p, ends, out);
    else if (p.out_type == TYPE_BF16)
        write_rows_staged<TYPE_BF16>(p, ends, out, stage);
    else
        write_rows_staged<TYPE_FP16>(p, ends, out, stage);
}

// Of the thread's two rows.
struct RowPowers {
    RowPower low, high;

    DEVICE explicit RowPowers(const float (&out)[HALF_COLUMNS / 2])
        : low(magnitudes_of_row<0>(out)), high(magnitudes_of_row<1>(out)) {}

private:
    template <int HALF>
    DEVICE static float magnitudes_of_row(const float (&out)[HALF_COLUMNS / 2]) {
        float part[4] = {};
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 2; j += 4)
            for (int i = 0; i < 2; ++i) part[j / 4 % 2 * 2 + i] += fabsf(out[j + 2 * HALF + i]);
        float sum = part[0] + part[1] + (part[2] + part[3]);
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        return sum;
    }
};

DEVICE void write_partial(const Params& p, const Piece& piece, int row, int column, const float (&out)[HALF_COLUMNS / 2],
                          const RowPowers& own, const float (&maximum)[2], const float (&sum)[2]) {
    if (row / 16 * 16 >= piece.rows) return;
    const int slot = slot_of(p, piece, piece.part);
    uint2* target = static_cast<uint2*>(p.partial_out) + partial_place(slot, column / 8, threadIdx.x % WARPGROUP);
#pragma unroll
    for (int j = 0; j < HALF_COLUMNS / 2; j += 4)
        target[j / 4 * WARPGROUP] = make_uint2(own.low.pack(out[j], out[j + 1]), own.high.pack(out[j + 2], out[j + 3]));
    if (threadIdx.x % 4 > 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        powers(p, slot, column)[row + half * 8] = half ? own.high.power : own.low.power;
        if (column == 0) maxima_and_sums(p, slot)[row + half * 8] = make_float2(maximum[half], sum[half]);
    }
}

// Two neighbouring columns: as fp16, times the part's weight.
DEVICE void weigh_rounded(const RowPower& row, float weight, float& first, float& second) {
    const float2 two = unpack_fp16(row.pack(first, second));
    first = add_product(0.f, weight, two.x), second = add_product(0.f, weight, two.y);
}

// What merge_unit makes of the pair's parts, of which this CTA has written all but the last, in the thread's registers.
DEVICE void fold_parts(const Params& p, const Piece& piece, int row, int column, float (&out)[HALF_COLUMNS / 2],
                       const RowPowers& own, float (&maximum)[2], float (&sum)[2]) {
    const int before = piece.parts - 1, slot = slot_of(p, piece, 0);
    float weight[2][FOLDED_PARTS - 1], top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 part[FOLDED_PARTS];
        float power[FOLDED_PARTS - 1];
        top[half] = LOWEST;
#pragma unroll
        for (int i = 0; i < FOLDED_PARTS; ++i) {
            part[i] = make_float2(LOWEST, 0.f);
            if (i < before) {
                part[i] = __ldcg(maxima_and_sums(p, slot + i) + row + half * 8);
                power[i] = __ldcg(powers(p, slot + i, column) + row + half * 8);
            } else if (i == before) {
                part[i] = make_float2(maximum[half], sum[half]);
            }
            top[half] = fmaxf(top[half], part[i].x);
        }
        float total[FOLDED_PARTS];
#pragma unroll
        for (int i = 0; i < FOLDED_PARTS; ++i)
            total[i] = add_product(0.f, exp2_approximate(part[i].x - top[half]), part[i].y);
        sum[half] = __fadd_rn(__fadd_rn(total[0], total[1]), __fadd_rn(total[2], total[3]));
#pragma unroll
        for (int i = 0; i < FOLDED_PARTS - 1; ++i) weight[half][i] = part_weight(part[i].x, top[half], power[i]);
    }
    const float own_low = part_weight(maximum[0], top[0], own.low.power);
    const float own_high = part_weight(maximum[1], top[1], own.high.power);
#pragma unroll
    for (int j = 0; j < HALF_COLUMNS / 2; j += 4) {
        weigh_rounded(own.low, own_low, out[j], out[j + 1]);
        weigh_rounded(own.high, own_high, out[j + 2], out[j + 3]);
    }
    for (int half = 0; half < 2; ++half) maximum[half] = top[half];
#pragma unroll 1
    for (int i = before - 1; i >= 0; --i) {
        const uint2* part = static_cast<const uint2*>(p.partial_out);
        part += partial_place(slot + i, column / 8, threadIdx.x % WARPGROUP);
        const float low = i == 2 ? weight[0][2] : (i == 1 ? weight[0][1] : weight[0][0]);
        const float high = i == 2 ? weight[1][2] : (i == 1 ? weight[1][1] : weight[1][0]);
#pragma unroll
        for (int j = 0; j < HALF_COLUMNS / 8; ++j) {
            const uint2 four = __ldcg(part + j * WARPGROUP);
            const float2 one = unpack_fp16(four.x), other = unpack_fp16(four.y);
            out[4 * j] = add_product(out[4 * j], low, one.x);
            out[4 * j + 1] = add_product(out[4 * j + 1], low, one.y);
            out[4 * j + 2] = add_product(out[4 * j + 2], high, other.x);
            out[4 * j + 3] = add_product(out[4 * j + 3], high, other.y);
        }
    }
}

}  // namespace paged_mla_decode
