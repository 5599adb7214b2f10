// RMS norm of rows: out = x / sqrt(mean(x^2) + epsilon) * weight. One block of 256 threads for each row.

struct RmsNormParams {  // RMS_NORM in custom_kernel.py declares the same
    const float* x;       // [rows, columns]
    const float* weight;  // [columns]
    float* out;           // [rows, columns]
    int columns;
    float epsilon;
};

extern "C" __global__ void __launch_bounds__(256) rms_norm(const __grid_constant__ RmsNormParams p) {
    __shared__ float sums[256];
    const float* x = p.x + static_cast<long long>(blockIdx.x) * p.columns;
    float* out = p.out + static_cast<long long>(blockIdx.x) * p.columns;
    float sum = 0;
    for (int i = threadIdx.x; i < p.columns; i += 256) sum += x[i] * x[i];
    sums[threadIdx.x] = sum;
    for (int half = 128; half; half /= 2) {
        __syncthreads();  // the sums of the round before are written
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();  // sums[0] is the row's
    const float factor = rsqrtf(sums[0] / p.columns + p.epsilon);
    for (int i = threadIdx.x; i < p.columns; i += 256) out[i] = x[i] * factor * p.weight[i];
}
