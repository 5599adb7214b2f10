// Queries of a work tile into a stage of the pipeline.
#pragma once
#include "shared_storage.cuh"

namespace paged_mla_decode {

// Row R of a request is head R % heads of its query token R / heads. Each warp copies some of the rows that exist, of
// those in the stage; as many lanes more copy rope columns in memory of their own.
DEVICE void copy_queries(const Params& p, const WorkTile& work, uint32_t stage, uint32_t full, int warp) {
    constexpr int OWN = 16 / (PRODUCER_WARPS / STAGES_OF_TILE);
    const int lane = threadIdx.x % 32, row = warp * OWN + (ROPE_APART ? lane % OWN : lane);
    const int item = query_type(p) == TYPE_E4M3 ? 1 : 2;
    const bool apart = rope_memory(p) != nullptr, rope = ROPE_APART && lane >= OWN;
    if (lane == 0) mbarrier_arrive_expect_bytes(full, min(max(work.rows - warp * OWN, 0), OWN) * COLUMNS * item);
    __syncwarp();
    if (lane < (apart ? 2 * OWN : OWN) && row < work.rows)
        bulk_copy(stage + (ROWS == 16 ? row : row % 16) * QUERY_PITCH + (rope ? LATENT * item : 0),
                  static_cast<const char*>(rope ? rope_memory(p) : p.q) + query_offset(p, work, row, rope) * item,
                  (rope    ? ROPE
                   : apart ? LATENT
                           : COLUMNS) *
                      item,
                  full);
    __syncwarp();
}

#if SPARSE
// Of QK warps, since producers wait for the entries of lists.
DEVICE void copy_first_queries(const Params& p, const WorkTile& work, SharedStorage& shared, int warp) {
    const int stage = warp / STAGE_WARPS;
    if (stage < QUERY_STAGES)
        copy_queries(p, work, shared_address(shared.stages[stage]), shared_address(&shared.full[stage]), warp);
}
#endif

}  // namespace paged_mla_decode
