// What the parts of an output tile are multiplied by when they are added up: a QK warp works it out, a row for each
// lane, from the maxima and sums of the CTAs of a cluster, while PV warps compute the last tile.
#pragma once
#include "cluster_tiles.cuh"

namespace paged_mla_decode {

// A row's maximum of two parts, and by what their sums are multiplied.
struct PairWeights {
    float maximum, low, high;

    DEVICE PairWeights(float low_maximum, float high_maximum)
        : maximum(fmaxf(low_maximum, high_maximum)), low(exp2_approximate(low_maximum - maximum)),
          high(exp2_approximate(high_maximum - maximum)) {}
    DEVICE float add(float low_sum, float high_sum) const {
        return add_product(__fmul_rn(low, low_sum), high, high_sum);
    }
};

// Stores to another CTA's memory; the bytes count at its barrier.
DEVICE void send_float2(uint32_t address, const float2& v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
                 "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
}

class RowMerge {
    static_assert(ROWS <= 32);
    uint32_t sums_parity = 0, parts_parity = 0, done_parity = 1;
    float2 earlier;  // of the CTA's part before
    bool joined = false;  // the other CTAs of the cluster are known to have begun

public:
    // For each work tile, once its sums are published.
    DEVICE void next(const Params& p, const ClusterTileIterator& work_tiles, const WorkTile& work,
                     SharedStorage& shared) {
        const int lane = threadIdx.x % 32, row = lane % ROWS;
        wait_barrier(shared.sums_full, sums_parity);
        sums_parity ^= 1;
        float2 own = row_statistics(shared, row);
        if (CTA_PARTS > 1 && !work_tiles.ends_output_tile()) {
            earlier = own;
            return;
        }
        wait_barrier(shared.tile_done, done_parity);
        done_parity ^= 1;
        if (CTA_PARTS > 1 && !work_tiles.begins_output_tile()) {
            const PairWeights parts(earlier.x, own.x);
            shared.part_weights[0][row] = parts.low, shared.part_weights[CTA_PARTS - 1][row] = parts.high;
            own = make_float2(parts.maximum, parts.add(earlier.y, own.y));
        }
        float top = own.x, total = own.y;
        if (gridDim.x > 1) {
            exchange(own, row, shared);
            const auto of = [&](int rank) -> float2& { return shared.row_parts[rank][row]; };
            top = LOWEST, total = 0.f;
#pragma unroll 1
            for (int rank = 0; rank < gridDim.x; rank += 2) top = fmaxf(top, fmaxf(of(rank).x, of(rank + 1).x));
#pragma unroll 1
            for (int rank = 0; rank < gridDim.x; rank += 2) {
                const float2 low = of(rank), high = of(rank + 1);
                const PairWeights pair(low.x, high.x);
                const float weight = exp2_approximate(pair.maximum - top);
                total = add_product(total, weight, pair.add(low.y, high.y));
                if (lane < ROWS) of(rank) = make_float2(pair.low, weight), of(rank + 1).x = pair.high;
            }
        }
        const int head = min(work.row_tile * ROWS + row, p.heads - 1);
        const RowNormalisation norm = normalise_row(p, top, total, head, output_scale(p));
        shared.factor_out[row] = norm.factor;
        if (cluster_rank() == 0 && lane < work.rows) write_lse(p, work, row, norm.lse);
        release(shared.weights_full);
    }

    // After cluster_arrive_relaxed(), at the latest before the end.
    DEVICE void join() {
        if (!joined) wait_for_cluster();
        joined = true;
    }

private:
    DEVICE void exchange(const float2& own, int row, SharedStorage& shared) {
        const int lane = threadIdx.x % 32;
        join();
        const uint32_t barrier = shared_address(&shared.row_parts_full);
        if (lane == 0) mbarrier_arrive_expect_bytes(barrier, gridDim.x * sizeof(shared.row_parts[0]));
        __syncwarp();
#pragma unroll 1
        for (int rank = 0; rank < gridDim.x; ++rank)
            if (lane < ROWS)
                send_float2(address_in_cta(shared_address(&shared.row_parts[cluster_rank()][row]), rank), own,
                            address_in_cta(barrier, rank));
        wait_barrier(shared.row_parts_full, parts_parity);
        parts_parity ^= 1;
    }
};

}  // namespace paged_mla_decode
