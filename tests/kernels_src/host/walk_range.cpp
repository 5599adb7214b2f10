// The stream-K scheduler compiled for the host: the work tiles of one CTA. The 32 lanes of a warp are fibers, which meet
// at each shuffle.
//
// Build: -DSOURCE="scheduler.cuh" -DMLA=0|1 and what the kernel itself takes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;

struct Signed {
    int x, y, z;
};
static Signed threadIdx, blockIdx, gridDim;

constexpr int LANES = 32;
static ucontext_t caller, lanes[LANES];
static int sent[LANES];

// Runs the other lanes up to the same point.
static void meet() { swapcontext(&lanes[threadIdx.x], &caller); }

static int exchange(int value, int from) {
    const int lane = threadIdx.x;
    sent[lane] = value;
    meet();
    const int got = sent[from < 0 ? lane : from];
    meet();
    return got;
}

static int __shfl_sync(unsigned, int value, int lane) { return exchange(value, lane); }
static int __shfl_up_sync(unsigned, int value, int step) { return exchange(value, threadIdx.x - step); }
static unsigned __ballot_sync(unsigned, int predicate) {
    unsigned ballot = 0;
    sent[threadIdx.x] = predicate != 0;
    meet();
    for (int lane = 0; lane < LANES; ++lane) ballot |= unsigned(sent[lane]) << lane;
    meet();
    return ballot;
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
    sent[threadIdx.x] = value;
    meet();
    const unsigned most = *std::max_element(sent, sent + LANES);
    meet();
    return most;
}
static int __ffs(int value) { return __builtin_ffs(value); }
static int __clz(int value) { return __builtin_clz(value); }
static int __popc(unsigned value) { return __builtin_popcount(value); }
static int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
// The device's result is off by up to two units in the last place.
static float quotient_error = 0;
static float __fdividef(float a, float b) { return a / b * (1 + quotient_error); }

// Declared for what is never called.
size_t __cvta_generic_to_shared(const void*);
float __uint_as_float(unsigned);
float __int_as_float(int);
float __shfl_xor_sync(unsigned, float, int);
unsigned __float_as_uint(float);
int atomicOr(unsigned*, unsigned);

#include SOURCE

static std::function<void()> body;
static void run_lane() {
    body();
    for (;;) meet();
}

// Calls `warp_function` in 32 lanes until lane 0 has returned.
static void run_warp(const std::function<void()>& warp_function) {
    constexpr size_t STACK = 1 << 16;
    static std::unique_ptr<char[]> stacks(new char[LANES * STACK]);
    bool done = false;
    body = [&] {
        const int lane = threadIdx.x;
        warp_function();
        if (lane == 0) done = true;
    };
    for (int lane = 0; lane < LANES; ++lane) {
        getcontext(&lanes[lane]);
        lanes[lane].uc_stack.ss_sp = stacks.get() + lane * STACK;
        lanes[lane].uc_stack.ss_size = STACK;
        makecontext(&lanes[lane], run_lane, 0);
    }
    while (!done)
        for (threadIdx.x = 0; threadIdx.x < LANES; ++threadIdx.x) swapcontext(&caller, &lanes[threadIdx.x]);
    threadIdx.x = 0;
}

// The CTA group of a tile, of `groups` that share `total` tiles; quotients are off by `error`, relatively.
extern "C" int cta_group(int total, int groups, int tile, float error) {
    stream_k::WorkRange range;
    range.total = total;
    range.cta_groups = groups;
    quotient_error = error;
    const int found = stream_k::cta_group_of(range, tile);
    quotient_error = 0;
    return found;
}

// Writes ten numbers for each work tile of a CTA: request, KV head, row tile, first and last KV tile, number of its
// split, splits, counter, and the slots of this split and of split 0. Returns the count of work tiles. Quotients are off
// by `error`, relatively.
extern "C" int walk(const void* parameters, const int* grid, const int* cta, int* to, float error) {
    quotient_error = error;
    gridDim = {grid[0], grid[1], grid[2]};
    blockIdx = {cta[0], cta[1], cta[2]};
    int count = 0;
    const auto write = [&](std::initializer_list<int> row) { std::copy(row.begin(), row.end(), to + 10 * count++); };
#if MLA
    using namespace paged_mla_decode;
    const Params& p = *static_cast<const Params*>(parameters);
    WorkRange range;
    run_warp([&] { find_work_range(p, range); });
    WorkTileIterator work_tiles(p, range);
    WorkTile work;
    while (work_tiles.next(work))
        write({work.request, 0, work.row_tile, work.first, work.last, work.splits.index, work.splits.count,
               work.splits.counter, work.splits.slot(work.splits.index), work.splits.slot(0)});
#else
    using namespace paged_decode;
    const Params& p = *static_cast<const Params*>(parameters);
    WorkRange range;
    run_warp([&] {
        const WorkRange own = find_work_range(p);
        if (threadIdx.x == 0) range = own;
    });
    for_each_work_tile(p, range, [&](const WorkTile& work) {
#if SEGMENTS
        write({work.request.index, work.rows.head, work.row_tile, work.request.first_tile + work.first,
               work.request.first_tile + work.last, work.split, DecodeTiling::split_count(p, work.request),
               DecodeTiling::output_tile_index(p, work, DecodeTiling::max_row_tiles(p)),
               first_slot(p, range, range.cta_group), work.first == 0});
        return;
#endif
        const SplitSet splits = stream_k::splits_of<DecodeTiling>(p, range, work);
        write({work.request.index, work.rows.head, work.row_tile, work.first, work.last, splits.index, splits.count,
               splits.counter, splits.slot(splits.index), splits.slot(0)});
    });
#endif
    quotient_error = 0;
    return count;
}

// Writes the first KV tile of a request, its KV tiles, and the first key that all its query tokens see; then for each of
// them which of the last q_len keys it sees, and the first key of its window.
extern "C" void row_bounds(const void* parameters, int request, int* to) {
#if MLA
    using namespace paged_mla_decode;
    const Params& p = *static_cast<const Params*>(parameters);
    const stream_k::Request r = MlaTiling::load_request(p, request);
    *to++ = r.first_tile, *to++ = r.kv_tiles, *to++ = 0;
    WorkTile work;
    work.request = request, work.row_tile = 0, work.kv_len = r.kv_len, work.q_begin = r.q_begin, work.q_len = r.q_len;
    for (int token = 0; token < r.q_len; ++token) *to++ = visible_drafts(p, work, token * p.heads), *to++ = 0;
#else
    using namespace paged_decode;
    const Params& p = *static_cast<const Params*>(parameters);
    const Request r = DecodeTiling::load_request(p, request);
    *to++ = r.first_tile, *to++ = r.kv_tiles, *to++ = visible_to_all_from(p, r);
    for (int token = 0; token < r.q_len; ++token) {
        const bool exists = follows_keys(p, r, token);
        *to++ = exists ? visible_drafts(p, r, token) : 0;
        *to++ = exists ? window_begin(p, r, token) : NEVER_VISIBLE;
    }
#endif
}

#if SEGMENTS
extern "C" int all_rows_see_tile(const void* parameters, int request, int token) {
    using namespace paged_decode;
    const Params& p = *static_cast<const Params*>(parameters);
    return all_rows_see(p, DecodeTiling::load_request(p, request), token);
}

// Writes the slots of the partials of a CTA's work tile number `wanted` in the order in which they are folded; returns
// their count, or -1 where those asked for one by one are others.
extern "C" int partials(const void* parameters, const int* grid, const int* cta, int wanted, int* to) {
    using namespace paged_decode;
    gridDim = {grid[0], grid[1], grid[2]};
    blockIdx = {cta[0], cta[1], cta[2]};
    const Params& p = *static_cast<const Params*>(parameters);
    WorkRange range;
    run_warp([&] {
        const WorkRange own = find_work_range(p);
        if (threadIdx.x == 0) range = own;
    });
    int count = 0, number = 0;
    for_each_work_tile(p, range, [&](const WorkTile& work) {
        if (number++ != wanted) return;
        PartialWalk walk(p, range, work);
        for (int slot; (slot = walk.next_slot()) >= 0;) to[count++] = slot;
        const Partials partials(p, range, work);
        bool are_equal = partials.count == count;
        for (int i = 0; i < count && are_equal; ++i) are_equal = partials.slot(i) == to[i];
        if (!are_equal) count = -1;
    });
    return count;
}
#endif
