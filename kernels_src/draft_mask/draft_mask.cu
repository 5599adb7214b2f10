// Draft masks: which query tokens of its request each query token sees, one bit each, as decode kernels read them.
//
//   parents [tokens]          -> ancestors, by pointer doubling in shared memory -+
//   allowed [tokens, columns] -> bits of the row's bytes                         -+-> out uint32 [tokens, words]
//   neither                   -> causal                                          -+
//
// A CTA has a request. Nothing is read back by the host: a parent that does not come before its token counts as none
// and is recorded in the status word.
//
// Build: -DKERNEL_NAME=symbol.

#include "../common/ptx.cuh"
#include "DraftMaskParams.h"
#include "KernelConstants.h"

using Params = DraftMaskParams;

namespace draft_mask {

constexpr int THREADS = DRAFT_MASK_THREADS;
constexpr int TOKENS = 64;  // of a request, at most
static_assert(THREADS >= TOKENS / 32 * TOKENS, "a thread has a word of the output");

struct Request {
    int begin, count;
};

DEVICE void report(const Params& p, uint32_t bit) { atomicOr(static_cast<uint32_t*>(p.status), bit); }

DEVICE Request load_request(const Params& p, int index) {
    if (!p.q_cu_seq_lens) return {index * p.q_len, p.q_len};
    const int* sums = static_cast<const int*>(p.q_cu_seq_lens) + index;
    const int64_t count = static_cast<int64_t>(sums[1]) - sums[0];
    if (count < 0 || count > p.q_len || sums[0] < 0 || sums[1] > p.tokens) {
        if (threadIdx.x == 0) report(p, STATUS_QUERIES);
        return {0, 0};
    }
    return {sums[0], static_cast<int>(count)};
}

// The parent of a query token; -1: it is a root.
DEVICE int load_parent(const Params& p, const Request& r, int token) {
    const int parent = static_cast<const int*>(p.parents)[(r.begin + token) * p.parents_stride];
    if (parent >= -1 && parent < token) return parent;
    report(p, STATUS_DRAFT_PARENT);
    return -1;
}

// The token itself and its ancestors. After round n, a token sees 2^n of them, itself included, and `above` is the
// next.
DEVICE uint64_t tree_bits(const Params& p, const Request& r) {
    __shared__ uint64_t seen_by[TOKENS];
    __shared__ int next_of[TOKENS];
    const int token = threadIdx.x;
    const bool exists = token < r.count;
    uint64_t seen = exists ? uint64_t{1} << token : 0;
    int above = exists ? load_parent(p, r, token) : -1;
    for (int known = 1; known < r.count; known *= 2) {
        if (exists) seen_by[token] = seen, next_of[token] = above;
        __syncthreads();  // all tokens have published what they see
        if (above >= 0) seen |= seen_by[above], above = next_of[above];
        __syncthreads();  // all have read it
    }
    return seen;
}

// The bits of 32 bytes of a row.
DEVICE uint32_t row_bits(const Params& p, const Request& r, int token, int word) {
    const uint8_t* row = static_cast<const uint8_t*>(p.allowed) + (r.begin + token) * p.allowed_token_stride;
    uint32_t bits = 0;
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
        const int column = word * 32 + bit;
        if (column < r.count && row[column * p.allowed_column_stride]) bits |= 1u << bit;
    }
    return bits;
}

}  // namespace draft_mask

extern "C" __global__ void __launch_bounds__(draft_mask::THREADS) KERNEL_NAME(const __grid_constant__ Params p) {
    using namespace draft_mask;
    wait_for_previous_grid();
    allow_next_grid();  // whose CTAs wait for the end of this grid before they read
    const Request r = load_request(p, blockIdx.x);
    uint32_t* out = static_cast<uint32_t*>(p.out) + static_cast<int64_t>(r.begin) * p.words;
    if (p.allowed) {
        const int token = threadIdx.x / p.words, word = threadIdx.x - token * p.words;
        if (token < r.count) out[threadIdx.x] = row_bits(p, r, token, word);
        return;
    }
    const int token = threadIdx.x;
    const uint64_t seen = p.parents ? tree_bits(p, r) : ~uint64_t{0} >> (63 - token % TOKENS);
    if (token >= r.count) return;
    for (int word = 0; word < p.words; ++word) out[token * p.words + word] = static_cast<uint32_t>(seen >> 32 * word);
}
