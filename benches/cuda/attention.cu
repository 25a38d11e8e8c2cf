// The attention kernel of vendor/patches/0006 against float64, and its time.
//
//     cargo xtask vendor    # puts ggml's tree, with the patches beside it, into crates/sd-ggml-sys/vendor
//     (cd crates/sd-ggml-sys/vendor/ggml && patch -p1 < ../../../../vendor/patches/0006-cuda-attention-for-hopper.patch)
//     T=crates/sd-ggml-sys/vendor/ggml
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I$T/include -I$T/src -I$T/src/ggml-cuda benches/cuda/attention.cu -o attention
//     ./attention
//
// Prints a line for each shape: the relative error (Euclidean norm) of sampled queries in all heads, the largest error, how many
// results are no finite number, and the median time of attention and of packing its operands to half precision. Ends with 1 if a
// relative error is over 1e-3: half precision's operands cost 4e-4, and 8e-4 where scores are four times as sharp.

#include "common.cuh"
#include "fattn-wgmma.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace fw = fattn_wgmma;

#define OK(call)                                                                    \
    do {                                                                            \
        const cudaError_t error = (call);                                           \
        if (error != cudaSuccess) {                                                 \
            printf("line %d: %s\n", __LINE__, cudaGetErrorString(error));           \
            exit(2);                                                                \
        }                                                                           \
    } while (0)

// One block for each sampled query and head. Operands are [tokens, heads, channels].
static __global__ void reference(const float * q, const float * k, const float * v, double * out, const int * which, const int keys,
        const int channels, const int heads, const int kv_heads, const double scale) {
    extern __shared__ double weights[];
    __shared__ double sum;
    const int head    = blockIdx.y;
    const int kv_head = head / (heads / kv_heads);
    const float * query = q + ((int64_t) which[blockIdx.x]*heads + head)*channels;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) {
        const float * key = k + ((int64_t) j*kv_heads + kv_head)*channels;
        double score = 0.0;
        for (int c = 0; c < channels; ++c) {
            score += (double) query[c]*key[c];
        }
        weights[j] = score*scale;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double highest = weights[0];
        for (int j = 1; j < keys; ++j) {
            highest = max(highest, weights[j]);
        }
        sum = 0.0;
        for (int j = 0; j < keys; ++j) {
            weights[j] = exp(weights[j] - highest);
            sum += weights[j];
        }
    }
    __syncthreads();
    double value = 0.0;
    for (int j = 0; j < keys; ++j) {
        value += weights[j]*v[((int64_t) j*kv_heads + kv_head)*channels + threadIdx.x];
    }
    out[((int64_t) blockIdx.x*heads + head)*channels + threadIdx.x] = value / sum;
}

template <typename T> static T * device_copy(const std::vector<T> & values) {
    T * at;
    OK(cudaMalloc(&at, values.size()*sizeof(T)));
    OK(cudaMemcpy(at, values.data(), values.size()*sizeof(T), cudaMemcpyHostToDevice));
    return at;
}

static float median_ms(const std::vector<float> & times) {
    std::vector<float> sorted = times;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
}

struct shape {
    int queries, keys, heads, kv_heads;
    float sharpness;
    int channels = 128;
};

static bool check(const shape & s) {
    std::mt19937 random(s.queries*7 + s.keys);
    std::normal_distribution<float> normal;
    std::vector<float> q((size_t) s.queries*s.heads*s.channels), k((size_t) s.keys*s.kv_heads*s.channels), v(k.size());
    for (std::vector<float> * values : {&q, &k, &v}) {
        for (float & value : *values) {
            value = normal(random);
        }
    }
    for (float & value : q) {
        value *= s.sharpness;
    }
    float * dq = device_copy(q);
    float * dk = device_copy(k);
    float * dv = device_copy(v);
    float * out;
    half * hq;
    half * hk;
    half * hv;
    OK(cudaMalloc(&out, q.size()*sizeof(float)));
    OK(cudaMalloc(&hq, (size_t) s.queries*s.heads*fw::D*sizeof(half)));
    OK(cudaMalloc(&hk, (size_t) s.keys*s.kv_heads*fw::D*sizeof(half)));
    OK(cudaMalloc(&hv, (size_t) s.keys*s.kv_heads*fw::D*sizeof(half)));
    // no number, so that what is not written shows
    OK(cudaMemset(out, 0xFF, q.size()*sizeof(float)));

    const fw::encode_t encode = fw::find_encode();
    CUtensorMap q_map, k_map, v_map;
    if (encode == nullptr || !fw::describe_rows(encode, q_map, hq, s.queries, s.heads, 256, (size_t) 256*s.queries) ||
            !fw::describe_rows(encode, k_map, hk, s.keys, s.kv_heads, 256, (size_t) 256*s.keys) ||
            !fw::describe_rows(encode, v_map, hv, s.keys, s.kv_heads, 256, (size_t) 256*s.keys)) {
        printf("the driver does not describe tensors\n");
        exit(2);
    }
    OK(cudaFuncSetAttribute(fw::attention, cudaFuncAttributeMaxDynamicSharedMemorySize, fw::SMEM_BYTES));
    const float scale = 1.0f / sqrtf(s.channels);
    const int64_t row = s.channels*sizeof(float);
    const auto pack = [&] {
        fw::launch_pack<float>(dq, hq, s.queries, s.heads, s.channels, (int64_t) s.heads*row, row, 0);
        fw::launch_pack<float>(dk, hk, s.keys, s.kv_heads, s.channels, (int64_t) s.kv_heads*row, row, 0);
        fw::launch_pack<float>(dv, hv, s.keys, s.kv_heads, s.channels, (int64_t) s.kv_heads*row, row, 0);
    };
    const auto attend = [&] {
        const dim3 grid((s.queries + fw::BM - 1) / fw::BM, s.heads);
        fw::attention<<<grid, fw::THREADS, fw::SMEM_BYTES>>>(q_map, k_map, v_map, out, s.queries, s.keys, s.channels, s.heads, s.heads / s.kv_heads, scale*1.4426950408889634f);
        OK(cudaGetLastError());
    };
    cudaEvent_t begin, end;
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    const auto time = [&](const auto & work) {
        float ms;
        OK(cudaEventRecord(begin));
        work();
        OK(cudaEventRecord(end));
        OK(cudaEventSynchronize(end));
        OK(cudaEventElapsedTime(&ms, begin, end));
        return ms;
    };
    std::vector<float> packing, attending;
    for (int run = 0; run < 12; ++run) {
        packing.push_back(time(pack));
        attending.push_back(time(attend));
    }
    std::vector<float> found(q.size());
    OK(cudaMemcpy(found.data(), out, found.size()*sizeof(float), cudaMemcpyDeviceToHost));

    // the last queries, where a tile is not full, and others all over
    std::vector<int> which;
    for (int i = 0; i < std::min(s.queries, 48); ++i) {
        which.push_back(i < 8 ? s.queries - 1 - i : (int) ((int64_t) i*7919 % s.queries));
    }
    int * dwhich = device_copy(which);
    double * dwanted;
    std::vector<double> wanted(which.size()*s.heads*s.channels);
    OK(cudaMalloc(&dwanted, wanted.size()*sizeof(double)));
    OK(cudaFuncSetAttribute(reference, cudaFuncAttributeMaxDynamicSharedMemorySize, s.keys*(int) sizeof(double)));
    reference<<<dim3(which.size(), s.heads), s.channels, s.keys*sizeof(double)>>>(dq, dk, dv, dwanted, dwhich, s.keys, s.channels, s.heads, s.kv_heads, scale);
    OK(cudaGetLastError());
    OK(cudaMemcpy(wanted.data(), dwanted, wanted.size()*sizeof(double), cudaMemcpyDeviceToHost));

    const int64_t lost = std::count_if(found.begin(), found.end(), [](const float x) { return !std::isfinite(x); });
    double error = 0.0, norm = 0.0, largest = 0.0;
    for (size_t i = 0; i < which.size(); ++i) {
        for (int c = 0; c < s.heads*s.channels; ++c) {
            const double should = wanted[i*s.heads*s.channels + c];
            const double off    = found[(size_t) which[i]*s.heads*s.channels + c] - should;
            error += off*off;
            norm += should*should;
            largest = std::max(largest, std::fabs(off));
        }
    }
    const double relative = std::sqrt(error / norm);
    const double flop = 4.0*s.queries*s.keys*s.channels*s.heads;
    const float ms = median_ms(attending);
    printf("%5d queries %5d keys %2d/%d heads of %3d, sharpness %g: relative %.1e largest %.1e lost %lld, %.3f ms %.0f TFLOP/s, packing %.3f ms\n", s.queries, s.keys, s.heads,
        s.kv_heads, s.channels, s.sharpness, relative, largest, (long long) lost, ms, flop/ms/1e9, median_ms(packing));
    for (void * at : {(void *) dq, (void *) dk, (void *) dv, (void *) out, (void *) hq, (void *) hk, (void *) hv, (void *) dwhich, (void *) dwanted}) {
        OK(cudaFree(at));
    }
    return lost == 0 && relative < 1e-3;
}

int main() {
    bool is_right = true;
    for (const shape & s : std::vector<shape>{
            {128, 128, 1, 1, 1}, {128, 256, 2, 2, 1}, {100, 77, 3, 3, 1}, {1, 1, 1, 1, 1}, {300, 1000, 8, 2, 1}, {4096, 4160, 32, 32, 1},
            {4096, 4160, 32, 32, 4}, {1024, 1088, 32, 32, 1}, {4096, 8256, 32, 32, 1}, {16384, 16448, 32, 32, 1}, {1797, 1797, 32, 32, 1, 64}, {300, 333, 16, 4, 1, 72}, {37774, 27000, 4, 4, 1}}) {
        is_right &= check(s);
    }
    return is_right ? 0 : 1;
}
