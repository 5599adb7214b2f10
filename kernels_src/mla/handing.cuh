// What who computes P says beside it to the output warpgroups: of each tile, and of the rows of a piece at its end.
#pragma once
#include "output.cuh"
#include "rings.cuh"

namespace paged_mla_decode {

// P and all that goes with it are written. `speaks`: this thread says what is the same for all rows.
DEVICE void hand_tile(Shared& shared, Turn<HANDOVERS>& handovers, bool speaks, int valid, End end) {
    Handover& to = shared.handover[handovers.index];
    if (speaks) to.valid = valid, to.end = end;
    fence_async_proxy();
    __syncwarp();
    arrive_for_warp(shared.p_full[handovers.index]);
    handovers.advance();
}

// What becomes of a row at the end of a piece: how it becomes one of the output, and where; or its statistics go to a slot.
DEVICE void end_row(const Params& p, const Piece& piece, Handover& to, int slot, const int& row, float maximum, float sum) {
    if (piece.whole()) {
        const bool exists = row < piece.rows;
        const RowEnd end = end_row(p, maximum, sum, (piece.row_tile * ROWS + (exists ? row : 0)) % p.heads, output_scale(p));
        if (exists) write_lse(p, piece, row, end.lse);
        to.factor_out[row] = end.factor;
        to.offset_out[row] = exists ? row_offset(piece, row, p.heads, p.out_token_stride, p.out_head_stride) : -1;
    } else if (row / 16 * 16 < piece.rows) {
        maxima_and_sums(p, slot)[row] = make_float2(maximum, sum);
    }
}

}  // namespace paged_mla_decode
