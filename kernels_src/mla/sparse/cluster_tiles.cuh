// Output tiles of the sparse kernel in clusters: ROWS heads of a query token. A cluster of CTAs computes an output
// tile, each CTA an equal share of the tiles of its list. Grid: CTAs of a cluster (a power of two), clusters.
#pragma once
#include <type_traits>

#include "../few_rows/pv.cuh"

namespace paged_mla_decode {

DEVICE int cluster_rank() { return blockIdx.x; }
DEVICE int cluster_size_log2() { return __popc(gridDim.x - 1); }

// Where the warps of each role wait until one of QK_WARPS has initialised the CTA's barriers, and tell the cluster.
struct Start {
    enum Role { PV, PRODUCER, QK };
    static constexpr int BARRIER = FIRST_START_BARRIER;

    // The first QK warp, which then arrives as one of its role.
    DEVICE static void announce() {
        named_barrier_arrive<CONSUMERS + 32>(BARRIER + PV);
        named_barrier_arrive<PRODUCER_WARPS * 32 + 32>(BARRIER + PRODUCER);
    }

    template <int ROLE>
    DEVICE static void wait() {
        constexpr int THREADS_OF[] = {CONSUMERS + 32, PRODUCER_WARPS * 32 + 32, QK_WARPS * 32};
        named_barrier_sync<THREADS_OF[ROLE]>(BARRIER + ROLE);
        cluster_arrive_relaxed();
    }
};

// After Start::wait(). A launch without clusters would wait forever.
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

    DEVICE int token() const { return __fdividef(tile + 0.5f, row_tiles()); }  // exact below 2^20 tiles, and short
    // Of the work tile that comes next.
    DEVICE int rows() const { return min(ROWS, p.heads - (tile - token() * row_tiles()) * ROWS); }

    // The share of this CTA may be empty.
    DEVICE bool next(WorkTile& work) {
        if (!has_next()) return false;
        work.request = work.q_begin = token();
        const Request r = load_lengths(p, work.request);
        work.row_tile = tile - work.request * row_tiles();
        work.kv_len = r.kv_len;
        work.q_len = 1;
        work.rows = rows();
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

DEVICE int first_column(int warp, int m) { return (warp * COLUMN_TILES + m) * 16; }

// The thread's two rows of eight, and by what their sums are multiplied at last.
struct TwoRows {
    int first, exist;  // of the output tile; how many of the two
    float2 factor;
    int64_t at[2];  // in the output, where the thread's two stores of its first group go; in elements

    // `column`: of the thread's first group.
    DEVICE TwoRows(const Params& p, const WorkTile& work, int eight, int column, const SharedStorage& shared)
        : first(eight * 8 + threadIdx.x % 4 * 2), exist(work.rows - first),
          factor(*reinterpret_cast<const float2*>(&shared.factor_out[first])) {
        const int pair = threadIdx.x % 32 / 4;
        const int64_t row = work.request * p.out_token_stride + (work.row_tile * ROWS + first) * p.out_head_stride;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            at[i] =
                row + column +
                (KV_E4M3 ? i * p.out_head_stride + pair * 2 : pair % 2 * p.out_head_stride + i * 8 + pair - pair % 2);
    }
};

template <int TYPE>
DEVICE void store_two(const Params& p, int64_t at, float low, float high) {
    if constexpr (TYPE == TYPE_E4M3)
        *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + at) = pack_two<TYPE>(low, high);
    else
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at) = pack_two<TYPE>(low, high);
}

// Stores the group so many columns behind the thread's first: 16 columns of its two rows, of which it has those that
// Output says. With e4m3 rows these are neighbours; otherwise lanes exchange columns, so that each has two of one row.
template <int TYPE>
DEVICE void store_group(const Params& p, const TwoRows& rows, int columns, const float4& sums) {
    const float v[2][2] = {{sums.x * rows.factor.x, sums.y * rows.factor.y},
                           {sums.z * rows.factor.x, sums.w * rows.factor.y}};
    if constexpr (KV_E4M3) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (i < rows.exist) store_two<TYPE>(p, rows.at[i] + columns, v[0][i], v[1][i]);
    } else {
        const int odd = threadIdx.x / 4 % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float got = __shfl_xor_sync(~0u, v[half][1 - odd], 4);
            if (odd < rows.exist)
                store_two<TYPE>(p, rows.at[half] + columns, odd ? got : v[half][0], odd ? v[half][1] : got);
        }
    }
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
DEVICE void store_groups(const Params& p, const WorkTile& work, int warp, const SharedStorage& shared,
                         const Output& out) {
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        const TwoRows rows(p, work, n, first_column(warp, 0), shared);
        store_as_type(p, [&](auto type) {
#pragma unroll
            for (int m = 0; m < COLUMN_TILES; ++m) {
                const float (&own)[4] = out[m][n];
                store_group<type>(p, rows, m * 16, make_float4(own[0], own[1], own[2], own[3]));
            }
        });
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

// Arrives for the warp at a barrier of another CTA, once its loads from the CTA's own memory have completed. A release
// at the scope of a cluster would wait for all stores to global memory.
DEVICE void release_in_cta(uint64_t& barrier, int rank) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile(
            "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cta(shared_address(&barrier), rank))
            : "memory");
}

// The same at the barrier of each CTA of the cluster.
DEVICE void release_in_cluster(uint64_t& barrier) {
#pragma unroll 1
    for (int rank = 0; rank < gridDim.x; ++rank) release_in_cta(barrier, rank);
}

// Sends the warp's groups of the first 16 rows to the CTA that merges them; what the CTA merges itself does not go
// through the network of the cluster.
DEVICE void send_groups(int warp, const Output& out, SharedStorage& shared) {
    constexpr int GROUPS = 1 << WARP_GROUPS_LOG2, HALVES = MAX_CLUSTER > CONSUMER_WARPS ? 2 : 1, PART = GROUPS / HALVES;
    const int lane = threadIdx.x % 32, log2 = cluster_size_log2(), own = OUTPUT_GROUPS >> log2;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int first = warp * GROUPS + half * PART, rank = first << log2 >> OUTPUT_GROUPS_LOG2;
        const bool merges = rank == cluster_rank();
        float4* const sums = &shared.merge[cluster_rank() * own + first - rank * own][lane];
        const uint32_t barrier = address_in_cta(shared_address(&shared.merge_full), rank);
        const uint32_t far_sums = address_in_cta(shared_address(sums), rank);
#pragma unroll
        for (int i = 0; i < PART; ++i) {
            const int group = half * PART + i;
            const float (&v)[4] = out[group / 2][group % 2];
            const float4 four = make_float4(v[0], v[1], v[2], v[3]);
            if (merges)
                sums[i * 32] = four;
            else
                send_float4(far_sums + i * sizeof(shared.merge[0]), four, barrier);
        }
    }
    __syncwarp();
    if (threadIdx.x == 0)
        mbarrier_arrive_expect_bytes(shared_address(&shared.merge_full),
                                     (gridDim.x - 1) * own * sizeof(shared.merge[0]));
    else if (lane == 0)
        mbarrier_arrive(shared_address(&shared.merge_full));
}

// low * a + high * b for the thread's two rows, which lie as Output says.
DEVICE float4 add_pair(const float2& low, const float4& a, const float2& high, const float4& b) {
    return make_float4(add_product(__fmul_rn(low.x, a.x), high.x, b.x), add_product(__fmul_rn(low.y, a.y), high.y, b.y),
                       add_product(__fmul_rn(low.x, a.z), high.x, b.z),
                       add_product(__fmul_rn(low.y, a.w), high.y, b.w));
}

DEVICE float2 two_weights(const float (&weights)[ROWS], int row) {
    return *reinterpret_cast<const float2*>(&weights[row]);
}

// Adds an earlier part of the CTA's to a later one, as merge_groups adds up the parts of two CTAs.
DEVICE void add_part(const float (&weights)[CTA_PARTS][ROWS], const Output& earlier, Output& out) {
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        const int row = n * 8 + threadIdx.x % 4 * 2;
        const float2 low = two_weights(weights[0], row), high = two_weights(weights[CTA_PARTS - 1], row);
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m) {
            const float (&a)[4] = earlier[m][n];
            float (&b)[4] = out[m][n];
            const float4 sum =
                add_pair(low, make_float4(a[0], a[1], a[2], a[3]), high, make_float4(b[0], b[1], b[2], b[3]));
            b[0] = sum.x, b[1] = sum.y, b[2] = sum.z, b[3] = sum.w;
        }
    }
}

// Merges the warp's part of the groups that the CTA was sent, of rows 16 half and on, and stores them: those of two
// neighbouring CTAs are added up, and then the pairs in their order.
DEVICE void merge_groups(const Params& p, const WorkTile& work, int warp, int half, const SharedStorage& shared) {
    constexpr int MOST = OUTPUT_GROUPS / 2 / CONSUMER_WARPS;  // groups of a warp
    const uint32_t lane = threadIdx.x % 32, own = OUTPUT_GROUPS >> cluster_size_log2();
    const auto group = [&](int i) -> uint32_t { return warp + i * CONSUMER_WARPS; };
    const TwoRows rows(p, work, half * 2 + warp % 2, (cluster_rank() * own + warp) / 2 * 16, shared);
    const float2* parts = &shared.row_parts[0][rows.first];
    const float4* sent = &shared.merge[warp][lane];
    float4 sums[MOST];
#pragma unroll
    for (int i = 0; i < MOST; ++i) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int pair = 0; pair < gridDim.x / 2; ++pair) {
        // of the two rows, each with the pair's
        const float4 first = *reinterpret_cast<const float4*>(parts);
        const float4 second = *reinterpret_cast<const float4*>(parts + ROWS);
        const float2 low = make_float2(first.x, first.z), high = make_float2(second.x, second.z);
        const float2 weight = make_float2(first.y, first.w);
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            if (group(i) >= own) break;
            const float4* const own_sums = sent + i * CONSUMER_WARPS * 32;
            const float4 two = add_pair(low, own_sums[0], high, own_sums[own * 32]);
            sums[i].x = add_product(sums[i].x, weight.x, two.x);
            sums[i].y = add_product(sums[i].y, weight.y, two.y);
            sums[i].z = add_product(sums[i].z, weight.x, two.z);
            sums[i].w = add_product(sums[i].w, weight.y, two.w);
        }
        parts += 2 * ROWS, sent += 2 * own * 32;
    }
    store_as_type(p, [&](auto type) {
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (group(i) < own) store_group<type>(p, rows, i * CONSUMER_WARPS / 2 * 16, sums[i]);
    });
}

}  // namespace paged_mla_decode
