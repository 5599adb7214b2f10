// What the consumers of batch-invariant decode share: what rows see, and the partials of segments in the workspace.
#pragma once
#include "../../common/segments.cuh"
#include "epilogue.cuh"
#include "queries.cuh"

namespace paged_decode {

using segments::Statistics;

constexpr int SEGMENT_TILES = DecodeTiling::SEGMENT_TILES;
static_assert(TILE_TOKENS == SEGMENT_TILE_TOKENS && USE_TMA, "the tiles of prefill");
static_assert(!WARPGROUP_MMA || KV_E4M3 || SPAN == PRODUCT_SPAN, "products read keys and values as they lie");
// Keys of a tile are read before values of the tile in front of it: a warp that filled stages of both could be a pass
// ahead of what the stage's barrier tells apart.
static_assert(STAGES % PRODUCER_WARPS == 0, "a stage is always filled by the same warp");

// The softmax scale; negative where scores change their sign.
struct Scale {
    float log2;
    bool flips;
    DEVICE explicit Scale(const Params& p, float of_keys = 1.f) {
        float signed_log2 = p.softmax_scale_log2;
        if (p.softmax_scale_device != nullptr) signed_log2 *= *static_cast<const float*>(p.softmax_scale_device);
        if constexpr (KV_E4M3) signed_log2 *= of_keys;
        log2 = segments::positive_scale(signed_log2);
        flips = signed_log2 < 0.f;
    }
};

// By the first ROWS threads; a barrier must follow.
DEVICE void find_visible_keys(const Params& p, const WorkTile& work, SharedStorage& shared) {
    if (threadIdx.x >= ROWS) return;
    const int token = coordinates_of(p, work.rows.first + threadIdx.x).token;
    const Request& r = work.request;
    const bool exists = threadIdx.x < work.rows.count && follows_keys(p, r, token);
    shared.row_mask[threadIdx.x] = exists ? visible_drafts(p, r, token) : 0;
    shared.row_begin[threadIdx.x] = exists ? window_begin(p, r, token) : NEVER_VISIBLE;
}

// The keys that a row sees, counted from key `origin` on. No draft token is behind the last key.
struct VisibleKeys {
    int begin, prefix;
    DraftMask drafts;
    DEVICE VisibleKeys(const WorkTile& work, const SharedStorage& shared, int row, int origin)
        : begin(shared.row_begin[row] - origin), prefix(work.request.kv_len - work.request.q_len - origin),
          drafts(shared.row_mask[row]) {}
    DEVICE bool key(int key) const {
        const int draft = key - prefix;
        return key >= begin && (draft < 0 || (draft < 64 && (drafts >> draft & 1)));
    }
};

// Whether a segment ends with a KV tile of the request.
DEVICE bool ends_segment(const Request& r, int tile) { return (r.first_tile + tile + 1) % SEGMENT_TILES == 0; }

// Arrives with the work tile's partials, which all consumers have written. Returns whether those of the output tile are
// complete with them. Contains two barriers of the consumers.
DEVICE bool arrives_last(const Params& p, const WorkTile& work, SharedStorage& shared) {
    const Request& r = work.request;
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    if (threadIdx.x == 0) {
        const int own = DecodeTiling::split_from(p, r, work.last) - work.split;
        uint32_t* counter = static_cast<uint32_t*>(p.counters) +
                            DecodeTiling::output_tile_index(p, work, DecodeTiling::max_row_tiles(p));
        // Release: the partials, ordered before by the barrier, are visible to whoever acquires.
        const int arrived = static_cast<int>(atomic_add_acq_rel(counter, own)) + own;
        shared.arrived_last = arrived == DecodeTiling::split_count(p, r);
        if (shared.arrived_last) *counter = 0;  // ready for the next launch
    }
    named_barrier_sync<CONSUMERS>(CONSUMER_BARRIER);
    return shared.arrived_last;
}

}  // namespace paged_decode
