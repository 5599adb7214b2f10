// Position in a pipeline of stages in shared memory, each with a full and an empty mbarrier.
#pragma once
#include "ptx.cuh"

// `phase` is that of the full barriers; it flips with each pass.
template <int SIZE>
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;
    DEVICE void advance() {
        if (++index == SIZE) index = 0, phase ^= 1;
    }
    DEVICE void advance(int steps) {  // by at most SIZE
        index += steps;
        if (index >= SIZE) {
            index -= SIZE;
            phase ^= 1;
        }
    }
    DEVICE void advance_far(uint32_t steps) {
        phase ^= steps / SIZE & 1;
        advance(steps % SIZE);
    }
};
