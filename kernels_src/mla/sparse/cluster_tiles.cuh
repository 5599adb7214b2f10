// Output tiles of the sparse kernel in clusters: ROWS heads of a query token. A cluster of CTAs computes an output tile,
// each CTA an equal share of the tiles of its list. Grid: CTAs of a cluster (a power of two), clusters.
#pragma once
#include <type_traits>

#include "../few_rows/pv.cuh"

namespace paged_mla_decode {

DEVICE int cluster_rank() { return blockIdx.x; }
DEVICE int cluster_size_log2() { return __popc(gridDim.x - 1); }

// After cluster_arrive_relaxed(). A launch without clusters would wait forever.
DEVICE void wait_for_cluster() {
    if (gridDim.x > 1) cluster_wait();
}

// Of the warpgroup's threads, from as many as any thread has at the launch.
template <int COUNT>
DEVICE void set_registers() {
    if constexpr (COUNT > 65536 / THREADS / 8 * 8)
        setmaxnreg_inc<COUNT>();
    else
        setmaxnreg_dec<COUNT>();
}

// Under batch invariance p.splits parts of a list make up its output, whatever the size of a cluster; a CTA has up to
// CTA_PARTS of them, one after the other, of which it keeps the first in registers.
static_assert(CTA_PARTS <= 2);

// Iterates over the output tiles of a cluster, every so many-th of all, and over the CTA's parts of each; every warp
// iterates alike.
struct ClusterTileIterator {
    const Params& p;
    int tile = blockIdx.y, part = 0;  // that come next

    DEVICE explicit ClusterTileIterator(const Params& params) : p(params) {}

    DEVICE int row_tiles() const { return row_tile_count(p, 1); }
    DEVICE bool two_parts() const { return CTA_PARTS == 2 && p.splits > gridDim.x; }
    DEVICE bool has_next() const { return tile < p.batch * row_tiles(); }
    // Of the work tile that came last, whether it is the first or the last part of its output tile.
    DEVICE bool begins_output_tile() const { return !two_parts() || part == 1; }
    DEVICE bool ends_output_tile() const { return part == 0; }

    // The share of this CTA may be empty.
    DEVICE bool next(WorkTile& work) {
        if (!has_next()) return false;
        const int token = tile / row_tiles();
        const Request r = load_lengths(p, token);
        work.request = work.q_begin = token;
        work.row_tile = tile - token * row_tiles();
        work.kv_len = r.kv_len;
        work.q_len = 1;
        work.rows = min(ROWS, p.heads - work.row_tile * ROWS);
        const int parts_log2 = two_parts(), tiles = kv_tile_count(r.kv_len), log2 = cluster_size_log2() + parts_log2;
        const int share = (cluster_rank() << parts_log2) + part;
        work.first = share * tiles >> log2;
        work.last = (share + 1) * tiles >> log2;
        part = part < parts_log2 ? 1 : 0;
        if (part == 0) tile += gridDim.y;
        return true;
    }
};

// ---------------------------------------------------------------- epilogue

constexpr int OUTPUT_GROUPS_LOG2 = 6, WARP_GROUPS_LOG2 = 3;
static_assert(1 << OUTPUT_GROUPS_LOG2 == OUTPUT_GROUPS && 1 << WARP_GROUPS_LOG2 == COLUMN_TILES * 2);
using Statistics = float2[ROWS / 8][2];  // maxima and sums of the rows of Output

// The thread's two rows of eight, and how sums become the output.
struct TwoRows {
    int first, exist;  // of the output tile; how many of the two
    int64_t at;  // in the output, of the first; in elements
    RowNormalisation norm[2];

    DEVICE TwoRows(const Params& p, const WorkTile& work, int eight, const float2 (&statistics)[2], float scale)
        : first(eight * 8 + threadIdx.x % 4 * 2), exist(work.rows - first) {
        const int head = work.row_tile * ROWS + first;
        at = work.request * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            norm[i] = normalise_row(p, statistics[i].x, statistics[i].y, min(head + i, p.heads - 1), scale);
    }
};

template <int TYPE>
DEVICE void store_two(const Params& p, int64_t at, float low, float high) {
    if constexpr (TYPE == TYPE_E4M3)
        *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + at) = pack_two<TYPE>(low, high);
    else
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at) = pack_two<TYPE>(low, high);
}

// Stores 16 columns of the thread's two rows, of which it has the columns that Output says. With e4m3 rows these are
// neighbours; otherwise lanes exchange columns, so that each has two of one row.
template <int TYPE>
DEVICE void store_group(const Params& p, const TwoRows& rows, int column, const float4& sums) {
    const int pair = threadIdx.x % 32 / 4;
    const float v[2][2] = {{sums.x * rows.norm[0].factor, sums.y * rows.norm[1].factor},
                           {sums.z * rows.norm[0].factor, sums.w * rows.norm[1].factor}};
    if constexpr (KV_E4M3) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (i < rows.exist)
                store_two<TYPE>(p, rows.at + i * p.out_head_stride + column + pair * 2, v[0][i], v[1][i]);
    } else {
        const int odd = pair % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float got = __shfl_xor_sync(~0u, v[half][1 - odd], 4);
            if (odd < rows.exist)
                store_two<TYPE>(p, rows.at + odd * p.out_head_stride + column + half * 8 + pair - odd,
                                odd ? got : v[half][0], odd ? v[half][1] : got);
        }
    }
}

DEVICE void store_lse(const Params& p, const WorkTile& work, const TwoRows& rows) {
    for (int i = 0; i < 2; ++i)
        if (i < rows.exist) write_lse(p, work, rows.first + i, rows.norm[i].lse);
}

// Calls `store` with the type of the output as the type of its argument.
template <class Store>
DEVICE void store_as_type(const Params& p, Store store) {
    if (p.out_type == TYPE_BF16)
        store(std::integral_constant<int, TYPE_BF16>());
    else if (p.out_type == TYPE_FP16)
        store(std::integral_constant<int, TYPE_FP16>());
    else
        store(std::integral_constant<int, TYPE_E4M3>());
}

// Stores the warp's groups of an output tile that the CTA has for itself.
DEVICE void store_groups(const Params& p, const WorkTile& work, int warp, const Statistics& statistics,
                         const Output& out) {
    const float scale = output_scale(p);
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        const TwoRows rows(p, work, n, statistics[n], scale);
        store_as_type(p, [&](auto type) {
#pragma unroll
            for (int m = 0; m < COLUMN_TILES; ++m) {
                const float(&own)[4] = out[m][n];
                store_group<type>(p, rows, (warp * COLUMN_TILES + m) * 16, make_float4(own[0], own[1], own[2], own[3]));
            }
        });
        if (threadIdx.x < 4) store_lse(p, work, rows);
    }
}

// ---------------------------------------------------------------- merge in a cluster

// Stores to another CTA's memory; the bytes count at its barrier.
DEVICE void send_float4(uint32_t address, const float4& v, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
        : "memory");
}

// Arrives for the warp at a barrier of another CTA.
DEVICE void release_in_cta(uint64_t& barrier, int rank) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                         address_in_cta(shared_address(&barrier), rank))
                     : "memory");
}

DEVICE void wait_cluster_barrier(uint64_t& barrier, uint32_t phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1, %2;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready: }" ::"r"(shared_address(&barrier)),
        "r"(phase), "n"(1 << 20)
        : "memory");
}

// Sends the warp's groups of rows 16 HALF and on to the CTA that merges them, and once to each CTA the maxima and sums.
template <int HALF>
DEVICE void send_groups(int warp, const Statistics& statistics, const Output& out, SharedStorage& shared) {
    const int lane = threadIdx.x % 32, log2 = cluster_size_log2(), own = OUTPUT_GROUPS >> log2;
    const int first = warp << WARP_GROUPS_LOG2, rank = first << log2 >> OUTPUT_GROUPS_LOG2;
    MergeInput& to = shared.merge;
    if (threadIdx.x == 0)
        mbarrier_arrive_expect_bytes(shared_address(&shared.merge_full),
                                     sizeof(to.sums) + (sizeof(to.statistics[0]) << log2));
    const uint32_t barrier = address_in_cta(shared_address(&shared.merge_full), rank);
    const uint32_t sums =
        address_in_cta(shared_address(&to.sums[cluster_rank() * own + first - rank * own][lane]), rank);
#pragma unroll
    for (int i = 0; i < 1 << WARP_GROUPS_LOG2; ++i) {
        const float(&v)[4] = out[i / 2][HALF * 2 + i % 2];
        send_float4(sums + i * sizeof(to.sums[0]), make_float4(v[0], v[1], v[2], v[3]), barrier);
    }
    if (first == rank * own && lane < 4)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2(&rows)[2] = statistics[HALF * 2 + n];
            send_float4(address_in_cta(shared_address(&to.statistics[cluster_rank()][n * 8 + lane * 2]), rank),
                        make_float4(rows[0].x, rows[0].y, rows[1].x, rows[1].y), barrier);
        }
}

// A row's maximum of two parts, and by what their sums are multiplied.
struct PairWeights {
    float maximum, low, high;

    DEVICE PairWeights(float low_maximum, float high_maximum)
        : maximum(fmaxf(low_maximum, high_maximum)),
          low(exp2_approximate(low_maximum - maximum)),
          high(exp2_approximate(high_maximum - maximum)) {}
    DEVICE float add(float low_sum, float high_sum) const {
        return add_product(__fmul_rn(low, low_sum), high, high_sum);
    }
};

// Adds an earlier part of the CTA's to a later one, as merge_groups adds up the parts of two CTAs.
DEVICE void add_part(const Statistics& earlier_statistics, const Output& earlier, Statistics& statistics, Output& out) {
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 low = earlier_statistics[n][i];
            float2& high = statistics[n][i];
            const PairWeights weights(low.x, high.x);
            high = make_float2(weights.maximum, weights.add(low.y, high.y));
#pragma unroll
            for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
                for (int j = i; j < 4; j += 2) out[m][n][j] = weights.add(earlier[m][n][j], out[m][n][j]);
        }
}

// Merges the warp's part of the groups that the CTA was sent, of rows 16 half and on, and stores them: those of two
// neighbouring CTAs are added up, and then the pairs in their order.
DEVICE void merge_groups(const Params& p, const WorkTile& work, int warp, int half, const SharedStorage& shared) {
    const int lane = threadIdx.x % 32, own = OUTPUT_GROUPS >> cluster_size_log2(), eight = warp % 2;
    const int ctas = gridDim.x;
    const MergeInput& from = shared.merge;
    const auto statistics_of = [&](int rank) {
        return *reinterpret_cast<const float4*>(&from.statistics[rank][eight * 8 + lane % 4 * 2]);
    };
    float top[2] = {LOWEST, LOWEST}, total[2] = {0.f, 0.f};
#pragma unroll 2
    for (int rank = 0; rank < ctas; ++rank) {
        const float4 rows = statistics_of(rank);
        top[0] = fmaxf(top[0], rows.x), top[1] = fmaxf(top[1], rows.z);
    }
#pragma unroll 1
    for (int rank = 0; rank < ctas; rank += 2) {
        const float4 low = statistics_of(rank), high = statistics_of(rank + 1);
        const PairWeights first(low.x, high.x), second(low.z, high.z);
        total[0] = add_product(total[0], exp2_approximate(first.maximum - top[0]), first.add(low.y, high.y));
        total[1] = add_product(total[1], exp2_approximate(second.maximum - top[1]), second.add(low.w, high.w));
    }
    const float2 statistics[2] = {make_float2(top[0], total[0]), make_float2(top[1], total[1])};
    const TwoRows rows(p, work, half * 2 + eight, statistics, output_scale(p));
#pragma unroll 1
    for (int i = warp; i < own; i += CONSUMER_WARPS) {
        float4 sums = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int rank = 0; rank < ctas; rank += 2) {
            const float4 a = from.sums[rank * own + i][lane], b = from.sums[(rank + 1) * own + i][lane];
            const float4 low = statistics_of(rank), high = statistics_of(rank + 1);
            const PairWeights first(low.x, high.x), second(low.z, high.z);
            const float weight[2] = {exp2_approximate(first.maximum - top[0]),
                                     exp2_approximate(second.maximum - top[1])};
            sums.x = add_product(sums.x, weight[0], first.add(a.x, b.x));
            sums.y = add_product(sums.y, weight[1], second.add(a.y, b.y));
            sums.z = add_product(sums.z, weight[0], first.add(a.z, b.z));
            sums.w = add_product(sums.w, weight[1], second.add(a.w, b.w));
        }
        store_as_type(p, [&](auto type) {
            store_group<type>(p, rows, (cluster_rank() * own + i) / 2 * 16, sums);
        });
    }
    if (cluster_rank() == 0 && warp < 2 && lane < 4) store_lse(p, work, rows);
}

}  // namespace paged_mla_decode
