// The producer warps: work tiles, queries, keys and values from global to shared memory by TMA.
#pragma once
#include "scheduler.cuh"

namespace context_attention {

// The keys of a request that some row of it sees: no page in front of them is read, and V rows there are cleared.
DEVICE int first_key(const Params& p, const WorkTile& work) { return first_visible(p, position_of(work, 0)); }

#if KV_E4M3 && PRODUCER_WARPGROUPS == 1
// A warp has the loaders of both, but uses one: they have their place in common.
template <class Part>
using Place = Part&;
#else
template <class Part>
using Place = Part;
#endif

// Loads the tiles of one of K and V into its pipeline, or into a buffer of e4m3 that takes one. COLUMNS are those of K
// or V, a row of a TMA box has BOX_BYTES.
template <int STAGES, int COLUMNS, int BOX_BYTES>
struct TileLoader {
    static constexpr int BOXES = COLUMNS * KV_BYTES / BOX_BYTES, BOX_COLUMNS = BOX_BYTES / KV_BYTES;
    static constexpr int STAGE_BYTES = COLUMNS * TILE_TOKENS * (CONVERTS_APART ? 1 : 2);
    // e4m3 comes to the second half of a stage, from which it is converted to the whole.
    static constexpr int OFFSET = CONVERTS_APART ? 0 : STAGE_BYTES - COLUMNS * TILE_TOKENS * KV_BYTES;

    const void* map;
    int64_t table_offset;  // from the page ids of keys to its own
    uint8_t* stages;
    uint64_t *full, *empty;
    Place<PipelineState<STAGES>> state;
    Place<paged_kv::PageWindow> pages;

    // Loads the tiles of a work tile and calls `before_last` when as many are left as the pipeline has stages.
    template <class Callable>
    DEVICE void load_all(const Params& p, const WorkTile& work, uint64_t policy, Callable before_last) {
        const int kv_head = work.head / p.group, late = max(work.first, work.last - STAGES);
        pages.loaded = -2;
#pragma unroll 1
        for (int tile = work.first;; ++tile) {
            if (tile == late) before_last();
            if (tile == work.last) break;
            load(p, work, kv_head, tile, policy);
        }
    }

    DEVICE void load(const Params& p, const WorkTile& work, int kv_head, int tile, uint64_t policy) {
        wait_barrier(empty[state.index], state.phase ^ 1);
        const int token = tile * TILE_TOKENS;
        const uint32_t to = shared_address(stages + state.index * STAGE_BYTES + OFFSET);
        const uint32_t barrier = shared_address(&full[state.index]);
        if (p.page_table == nullptr) {
            if (elect_one()) {
                mbarrier_arrive_expect_bytes(barrier, BOXES * TILE_TOKENS * BOX_BYTES);
#pragma unroll
                for (int box = 0; box < BOXES; ++box)
                    tma_load_4d(to + box * TILE_TOKENS * BOX_BYTES, map, barrier, box * BOX_COLUMNS,
                                work.kv_begin + token, kv_head, p.kv_cu_seq_lens == nullptr ? work.request : 0, policy);
            }
        } else {
            const int begin = first_key(p, work), chunk_log2 = paged_kv::chunk_tokens_log2(p);
            const int* ids = paged_kv::page_ids(p, work.request) + table_offset;
            pages.move_to(p, ids, begin, work.kv_len, max(token, begin));
            const int chunks = paged_kv::chunk_count(work.kv_len, token, chunk_log2);
            const int skipped = max(begin - token, 0) >> chunk_log2;
            const int chunk_bytes = BOX_BYTES << chunk_log2;
            if (elect_one()) mbarrier_arrive_expect_bytes(barrier, (chunks - skipped) * BOXES * chunk_bytes);
            __syncwarp();
            for (int chunk = skipped; chunk < chunks; ++chunk) {
                const int key = token + (chunk << chunk_log2);
                const int page = pages.page_of(key >> p.page_size_log2);
                if (elect_one()) {
#pragma unroll
                    for (int box = 0; box < BOXES; ++box)
                        tma_load_4d(to + box * TILE_TOKENS * BOX_BYTES + chunk * chunk_bytes, map, barrier,
                                    box * BOX_COLUMNS, key & ((1 << p.page_size_log2) - 1), kv_head, page, policy);
                }
            }
        }
        state.advance();
    }
};

using KeyLoader = TileLoader<CONVERTS_APART ? 1 : K_STAGES, HEAD_DIM, K_BOX_BYTES>;
using ValueLoader = TileLoader<CONVERTS_APART ? 1 : V_STAGES, VALUE_DIM, V_BOX_BYTES>;

DEVICE void load_queries(const Params& p, SharedStorage& shared, const WorkTile& work, uint64_t policy) {
    const uint32_t barrier = shared_address(&shared.q_full);
    mbarrier_arrive_expect_bytes(barrier, WARPGROUPS * K_SPANS * Q_SPAN_BYTES);
    for (int wg = 0; wg < WARPGROUPS; ++wg)
#pragma unroll
        for (int span = 0; span < K_SPANS; ++span)
            tma_load_3d(shared_address(shared.q[wg][span]), &p.q_map, barrier, span * SPAN_COLUMNS, work.head,
                        work.q_begin + work.token + (wg * WARPGROUP_ROWS >> p.packed_log2), policy);
}

// The last CTA that is done resets the counters for the next launch.
DEVICE void leave(const Params& p) {
    uint32_t* counters = counters_of(p);
    if (atomic_add_acq_rel(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
}

#if !KV_E4M3
// The warp that finds work tiles and loads their queries and keys.
DEVICE void load_keys(const Params& p, SharedStorage& shared) {
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    KeyLoader k{&p.k_map, 0, shared.k[0][0], shared.k_full, shared.k_empty};
    Schedule schedule(p);
    int number = blockIdx.x;
    for (uint32_t phase = 0;; phase ^= 1) {
        WorkTile work;
        if (!schedule.find(p, number, work)) work.request = -1;
        wait_barrier(shared.q_empty, phase ^ 1);
        if (elect_one()) {
            shared.work[phase] = work;
            if (work.request >= 0 && work.last > work.first)
                load_queries(p, shared, work, policy);
            else
                mbarrier_arrive(shared_address(&shared.q_full));
        }
        __syncwarp();
        if (work.request < 0) break;
        // Taken late, so that no work tile waits here while another CTA has none, and in flight while keys are loaded.
        k.load_all(p, work, policy, [&] {
            if (threadIdx.x % 32 == 0) number = atomic_add_relaxed(counters_of(p), 1) + gridDim.x;
        });
        number = __shfl_sync(~0u, number, 0);
    }
    if (threadIdx.x % 32 == 0) leave(p);
}

// The warp that loads values.
DEVICE void load_values(const Params& p, SharedStorage& shared) {
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    ValueLoader v{&p.v_map, p.v_table_offset, shared.v[0][0], shared.v_full, shared.v_empty};
    for (uint32_t phase = 0;; phase ^= 1) {
        wait_barrier(shared.q_full, phase);
        const WorkTile work = shared.work[phase];
        release(shared.q_empty);
        if (work.request < 0) break;
        v.load_all(p, work, policy, [] {});
    }
}
#endif

}  // namespace context_attention
