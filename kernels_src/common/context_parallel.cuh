// Context parallelism: the keys of a request are dealt to ranks in rounds of `cp_round` keys, of which this rank has
// `cp_interleave` from `cp_begin` on. Its own keys keep their order; page table and `seq_lens` count them alone, and
// the causal bound of a query token follows from `global_seq_lens`, the keys of the request on all ranks.
#pragma once
#include "ptx.cuh"

namespace context_parallel {

template <class Params>
DEVICE bool is_on(const Params& p) {
    return p.global_seq_lens != nullptr;
}

// This rank's keys among the first `keys` of a request; none if that is negative.
template <class Params>
DEVICE int own_keys(const Params& p, int keys) {
    const uint32_t count = max(keys, 0);
    const uint32_t rounds = static_cast<uint64_t>(count) * p.cp_round.multiplier >> 32 >> p.cp_round.shift;
    const int rest = count - rounds * p.cp_round.divisor - p.cp_begin;
    return rounds * p.cp_interleave + min(max(rest, 0), p.cp_interleave);
}

// This rank's keys in front of the one that lies `back` keys before the query token's own; none if there is no such.
template <class Params>
DEVICE int keys_before(const Params& p, int request, int q_len, int token, int back) {
    return own_keys(p, static_cast<const int*>(p.global_seq_lens)[request] - q_len + token - back);
}

// How many of this rank's last q_len keys of the request a query token sees.
template <class Params>
DEVICE int visible_count(const Params& p, int request, int kv_len, int q_len, int token) {
    return min(max(keys_before(p, request, q_len, token, -1) - (kv_len - q_len), 0), q_len);
}

}  // namespace context_parallel
