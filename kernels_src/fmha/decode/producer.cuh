// Producer warps: page table -> TMA boxes (or cp.async) of K and V into the pipeline.
#pragma once
#include "../../common/paged_kv.cuh"
#include "queries.cuh"

namespace paged_decode {

// Brings the queries of a work tile to L2 while the consumers are still busy with the previous one.
DEVICE void prefetch_query(const Params& p, const WorkTile& work) {
    constexpr int LINES = HEAD_DIM * 2 <= 128 ? 1 : HEAD_DIM * 2 / 128;  // of 128 bytes in a row, at most
    const int item = p.q_type == TYPE_E4M3 ? 1 : 2;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < work.rows.count * LINES; i += 32) {
        if (i % LINES * 128 < HEAD_DIM * item) prefetch_to_l2(query_row(p, work, i / LINES) + i % LINES * 128);
    }
}

// Producer warp `warp` loads the keys (or values) of every WARPS_PER_OPERAND-th KV tile.
DEVICE void produce(const Params& p, const WorkRange& range, int warp, SharedStorage& shared) {
    constexpr int WARPS_PER_OPERAND = PRODUCER_WARPS / 2;
    const int lane = threadIdx.x % 32;
    const bool values = warp % 2;
    const int page_tokens = 1 << p.page_size_log2;
    const int chunk_log2 = paged_kv::chunk_tokens_log2(p);
    const int chunk = 1 << chunk_log2;
    StageState state;
    state.advance(warp);
    int skip = warp / 2;  // KV tiles until this warp's next
    bool is_first = true;  // its queries are prefetched by prefetch_inputs
#if USE_TMA
    const uint64_t policy = l2_policy<L2Policy::L2_POLICY>();
    const void* map = values ? &p.v_map : &p.k_map;
#else
    const char* base = static_cast<const char*>(values ? p.v : p.k);
    const int64_t page_stride = values ? p.v_page_stride : p.k_page_stride;
    const int64_t token_stride = values ? p.v_token_stride : p.k_token_stride;
    const int64_t head_stride = values ? p.v_head_stride : p.k_head_stride;
#endif
    for_each_work_tile(p, range, [&](const WorkTile& work) {
        if (warp == 0 && !is_first) prefetch_query(p, work);
        is_first = false;
        paged_kv::PageWindow pages;
        const Request& r = work.request;
        const int* ids = paged_kv::page_ids(p, r.index) + (values ? p.v_table_offset : 0);
        const int end = end_tile(work);
        int tile = work.first + skip;
        for (; tile < end; tile += WARPS_PER_OPERAND) {
            const int token = (r.first_tile + tile) * TILE_TOKENS;
            const int chunks = paged_kv::chunk_count(r.kv_len, token, chunk_log2);
            pages.move_to(p, ids, work.begin, r.kv_len, token);
            // of this lane's chunk
            const int page = pages.page_of((token >> p.page_size_log2) + min(lane, chunks - 1));
            const uint32_t stage = shared_address(shared.stages[state.index]);
            const uint32_t full = shared_address(&shared.full[state.index]);
            // passes at once in the first pass of the pipeline
            mbarrier_wait(shared_address(&shared.empty[state.index]), state.phase ^ 1);
#if USE_TMA
            if (lane == 0) mbarrier_arrive_expect_bytes(full, chunks * chunk * TOKEN_BYTES);
            if (lane < chunks) {
                const int row = (token + lane * chunk) & (page_tokens - 1);
#pragma unroll
                for (int span = 0; span < SPANS; ++span)
                    tma_load_4d(stage + span * SPAN_BYTES + lane * chunk * SPAN, map, full, span * (SPAN / ITEM_BYTES),
                                row, work.rows.head, page, policy);
            }
#else
            constexpr int COLUMNS = TOKEN_BYTES / 16, COPIED_ROWS = 32 / COLUMNS;
            static_assert(COLUMNS <= 32, "a warp copies whole tokens");
            const int valid = min(r.kv_len - token, TILE_TOKENS);
            for (int rows = 0; rows < valid; rows += COPIED_ROWS) {
                const int row = rows + lane / COLUMNS;
                const int row_page = __shfl_sync(~0u, page, min(row, valid - 1) >> chunk_log2);
                if (row >= valid) continue;
                const int in_page = (token + row) & (page_tokens - 1);
                const int64_t element = row_page * page_stride + in_page * token_stride + work.rows.head * head_stride;
                cp_async_16(tile_address(stage, row, lane % COLUMNS), base + element * ITEM_BYTES + lane % COLUMNS * 16);
            }
            mbarrier_arrive_after_cp_async(full);
#endif
            state.advance(PRODUCER_WARPS);
        }
        skip = tile - max(end, work.first);
    });
}

}  // namespace paged_decode
