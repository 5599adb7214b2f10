// Paged MLA decode with an e4m3 cache and e4m3 queries on warp-level MMAs, for GPUs without warpgroup products whose
// CTAs have 99 KB of shared memory (SM120, SM121); shapes and scheduling as in paged_mla_decode.cu, KV tiles of 32
// keys.
//
//   warp 0              page table --> TMA --> pipeline of e4m3 tiles, a box for 64 columns
//   8 warps             S = Q K^T, e4m3 by e4m3: 16 rows by 16 keys each, both operands from shared memory
//                       P = softmax, fp16 --> shared memory
//                       O += P V, fp16 by fp16: 64 rows by an eighth of the columns each, V converted in registers
//
// P is fp16 as in paged_mla_decode_e4m3.cu: in e4m3 it would double the rate of the second product and have relative
// errors of 2^-4. The warps meet twice per tile: with its maxima, when nobody reads the last P and the last tile any
// more, and with P. There is no producer warp: nine would leave each thread 168 registers, and O takes 128.
//
// Per tile and 64 rows, 512 + 64 columns: 18 KB from DRAM or L2, 2.4 MFLOP in e4m3 and 2.1 MFLOP in fp16 (131 and 114
// per byte), 190 KB from shared memory. Tensor cores set the time: 3200 cycles at 1024 (e4m3) and 512 (fp16) products a
// cycle.
//
// Build: -DLATENT=512|256|128 -DROPE=64|32|0 -DKV_E4M3=1 -DROWS=64 -DTILE_TOKENS=32 -DBOX_COLUMNS=64 -DSTAGES=n
//        -DKERNEL_NAME=symbol

#include "portable/loads.cuh"
#include "portable/qk.cuh"
#include "portable/pv.cuh"

namespace paged_mla_decode {

// Computes the range's work tiles. Returns whether there were partials.
DEVICE bool attend(const Params& p, const WorkRange& range, SharedStorage& shared) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int row_tile = warp % ROW_TILES, key_warp = warp / ROW_TILES, keys = key_warp * KEYS;
    const float scale = softmax_scale_log2(p);
    bool partials = false;
    PipelineState<STAGES> tiles;
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work)) {
        TileLoads loads(work, tiles);
        if (warp == 0)
#pragma unroll 1
            for (int i = 0; i < STAGES; ++i) loads.load_next(p, work, shared);
        load_queries(p, work, shared);
        Rows rows(p, work, row_tile * 16 + threadIdx.x % 32 / 4);
        Output out = {};
        const int last = work.first + work.key_tiles();
#pragma unroll 1
        for (int tile = work.first; tile < last; ++tile) {
            Scores s;
            wait_barrier(shared.full[tiles.index], tiles.phase);
            multiply_keys(shared, tiles.index, row_tile, keys, s);
            scale_and_mask(work, tile * TILE_TOKENS + keys, scale, rows, s);
            publish_tops(s, rows, shared.top[key_warp]);
            __syncthreads();  // all maxima are there; the last tile, its P, factors and flags have been read
            if (warp == 0 && tile > work.first) loads.load_next(p, work, shared);
            raise_maxima(shared, row_tile, key_warp == 0, rows);
            store_probabilities(shared, row_tile, keys, s, rows);
            __syncthreads();  // P, factors and flags are there, and the maxima have been read
            rescale(shared, out);
            multiply_values(shared, tiles.index, work.valid(tile), out);
            fence_async_proxy();  // orders the reads before the TMA write that reuses the stage
            tiles.advance();
        }
        publish_statistics(shared, key_warp, rows);
        __syncthreads();  // and the last tile has been read
        if (work.whole()) {
            store_rows(p, work, shared, out);
        } else {
            store_partial(p, work, shared, out);
            __syncthreads();
            arrive(p, work.splits.counter);
            partials = true;
        }
    }
    return partials;
}

}  // namespace paged_mla_decode

extern "C" __global__ void __launch_bounds__(paged_mla_decode::CONSUMERS, 1)
    KERNEL_NAME(const __grid_constant__ PagedMlaDecodeParams p) {
    using namespace paged_mla_decode;
    SharedStorage& shared = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(shared_address(&shared.full[i]), 1);
        fence_mbarrier_init();
        prefetch_tensor_map(&p.kv_map);
    }
    wait_for_previous_grid();
    if (threadIdx.x < 32) find_work_range(p, shared.range);
    __syncthreads();
    const WorkRange& range = shared.range;
    if (attend(p, range, shared)) merge_range(p, range, reinterpret_cast<char*>(&shared));
    allow_next_grid();
    if (blockIdx.x == 0) report_invalid_lengths(p, threadIdx.x, CONSUMERS);
}
