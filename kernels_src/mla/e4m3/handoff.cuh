// What the threads that compute P publish to the PV warpgroups: each tile, and at the end of a work tile its rows.
#pragma once
#include "../epilogue.cuh"
#include "shared_storage.cuh"

namespace paged_mla_decode {

// Publishes a tile once P and what goes with it are written. `publishes`: this thread writes what is the same for all
// rows.
DEVICE void publish_tile(SharedStorage& shared, PipelineState<P_STAGES>& p_state, bool publishes, int valid,
                         Boundary end) {
    TileHandoff& to = shared.handoff[p_state.index];
    if (publishes) to.valid = valid, to.end = end;
    fence_async_proxy();
    __syncwarp();
    arrive_for_warp(shared.p_full[p_state.index]);
    p_state.advance();
}

// At the end of a work tile: how a row becomes a row of the output, or its statistics to the workspace.
DEVICE void normalise_row(const Params& p, const WorkTile& work, TileHandoff& to, int slot, const int& row,
                          float maximum, float sum) {
    if (work.whole()) {
        const bool exists = row < work.rows;
        const RowNormalisation norm =
            normalise_row(p, maximum, sum, (work.row_tile * ROWS + (exists ? row : 0)) % p.heads, output_scale(p));
        if (exists) write_lse(p, work, row, norm.lse);
        to.factor_out[row] = norm.factor;
        to.offset_out[row] = exists ? row_offset(work, row, p.heads, p.out_token_stride, p.out_head_stride) : -1;
    } else if (row / 16 * 16 < work.rows) {
        maxima_and_sums(p, slot)[row_place(row)] = make_float2(maximum, sum);
    }
}

}  // namespace paged_mla_decode
