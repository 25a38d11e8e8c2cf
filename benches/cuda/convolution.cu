// The convolution kernel of vendor/patches/0009 against float64, and its time.
//
//     cargo xtask vendor    # puts ggml's tree, with the patches beside it, into crates/sd-ggml-sys/vendor
//     (cd crates/sd-ggml-sys/vendor/ggml && for p in 0006 0009; do patch -p1 < ../../../../vendor/patches/$p-*.patch; done)
//     T=crates/sd-ggml-sys/vendor/ggml
//     nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I$T/include -I$T/src -I$T/src/ggml-cuda benches/cuda/convolution.cu -o convolution
//     ./convolution
//
// Prints a line for each shape: the relative error (Euclidean norm) of sampled results, the largest error, and the median time of all
// with what packs picture and kernel, and without. Kernels are in F16, or in F32 and computed as TF32. Ends with 1 if a relative error is over
// 1e-3: operands of eleven digits, which both have, cost 4e-4.

#include "common.cuh"
#include "conv2d-wgmma.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define OK(call)                                                                    \
    do {                                                                            \
        const cudaError_t error = (call);                                           \
        if (error != cudaSuccess) {                                                 \
            printf("line %d: %s\n", __LINE__, cudaGetErrorString(error));           \
            exit(2);                                                                \
        }                                                                           \
    } while (0)

// What the kernel asks of ggml.
[[noreturn]] void ggml_cuda_error(const char * statement, const char *, const char * file, const int line, const char * message) {
    printf("%s:%d: %s: %s\n", file, line, statement, message);
    exit(2);
}

int ggml_cuda_get_device() {
    return 0;
}

size_t ggml_type_size(const ggml_type type) {
    return type == GGML_TYPE_F32 ? 4 : 2;
}

bool ggml_is_contiguous(const ggml_tensor *) {
    return true;
}

size_t ggml_nbytes(const ggml_tensor * t) {
    return t->nb[3]*t->ne[3];
}

struct shape {
    int in, out, width, height, count, side;
    bool is_f32 = false;
};

static __global__ void reference(const float * x, const half * w, const float * w32, const float * bias, const float * added, double * y, const int64_t * which, const int samples, const shape s) {
    const int i = blockIdx.x*blockDim.x + threadIdx.x;
    if (i >= samples) {
        return;
    }
    int64_t at = which[i];
    const int column = at % s.width;
    const int row    = at / s.width % s.height;
    const int out    = at / ((int64_t) s.width*s.height) % s.out;
    const int n      = at / ((int64_t) s.width*s.height*s.out);
    double sum = bias[out] + added[at];
    const auto weight = [&](const int64_t i) { return (double) (s.is_f32 ? w32[i] : __half2float(w[i])); };
    for (int in = 0; in < s.in; ++in) {
        for (int ky = 0; ky < s.side; ++ky) {
            for (int kx = 0; kx < s.side; ++kx) {
                const int r = row + ky - s.side/2;
                const int c = column + kx - s.side/2;
                if (r >= 0 && r < s.height && c >= 0 && c < s.width) {
                    sum += (double) x[(((int64_t) n*s.in + in)*s.height + r)*s.width + c] * weight((((int64_t) out*s.in + in)*s.side + ky)*s.side + kx);
                }
            }
        }
    }
    y[i] = sum;
}

static __global__ void fill(float * x, const int64_t count, const uint32_t seed, const float scale) {
    const int64_t i = (int64_t) blockIdx.x*blockDim.x + threadIdx.x;
    if (i < count) {
        uint32_t h = (uint32_t) i*2654435761u + seed;
        h ^= h >> 16; h *= 0x85ebca6bu; h ^= h >> 13; h *= 0xc2b2ae35u; h ^= h >> 16;
        x[i] = ((float) (h >> 8) / 8388608.0f - 1.0f) * scale;
    }
}

static __global__ void halve(const float * x, half * y, const int64_t count) {
    const int64_t i = (int64_t) blockIdx.x*blockDim.x + threadIdx.x;
    if (i < count) {
        y[i] = __float2half(x[i]);
    }
}

static float * random(const int64_t count, const uint32_t seed, const float scale) {
    float * at;
    OK(cudaMalloc(&at, count*sizeof(float)));
    fill<<<(unsigned) ((count + 255) / 256), 256>>>(at, count, seed, scale);
    return at;
}

static ggml_tensor tensor(const ggml_type type, const int64_t a, const int64_t b, const int64_t c, const int64_t d, void * data) {
    ggml_tensor t = {};
    t.type = type;
    t.data = data;
    const int64_t ne[4] = {a, b, c, d};
    size_t stride = type == GGML_TYPE_F32 ? 4 : 2;
    for (int i = 0; i < 4; ++i) {
        t.ne[i] = ne[i];
        t.nb[i] = stride;
        stride *= ne[i];
    }
    return t;
}

template <typename F> static float median_ms(F run) {
    std::vector<float> times;
    cudaEvent_t begin, end;
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    for (int i = 0; i < 8; ++i) {
        OK(cudaEventRecord(begin));
        run();
        OK(cudaEventRecord(end));
        OK(cudaEventSynchronize(end));
        float ms;
        OK(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

int main() {
    const shape shapes[] = {
        {1152, 1152,   64,   64, 1, 3}, {1152, 1152, 128, 128, 1, 3}, {576, 576, 256, 256, 1, 3}, {288, 288, 512, 512, 1, 3}, {144, 144, 1024, 1024, 1, 3},
        { 144,    4, 1024, 1024, 1, 3}, { 288,  144, 1024, 1024, 1, 3}, {384, 384, 104, 60, 2, 3}, {192, 192, 416, 240, 4, 3}, {96, 96, 832, 480, 4, 3},
        {  16,  384,  104,   60, 1, 3}, { 640,  640, 52, 30, 2, 3}, {288, 144, 512, 512, 1, 1}, {  9, 33, 37, 19, 3, 3}, {100, 72, 45, 31, 1, 5},
        {128, 128, 258, 258, 4, 3, true}, {256, 256, 130, 130, 4, 3, true}, {512, 512, 34, 34, 4, 3, true}, {9, 33, 37, 19, 3, 3, true}, {100, 72, 45, 31, 1, 5, true},
    };
    bool good = true;
    printf("       in   out      pixels  side    error   largest    ms  TFLOP/s  without packing  TFLOP/s\n");
    for (const shape & s : shapes) {
        const int64_t ins = (int64_t) s.in*s.width*s.height*s.count, outs = (int64_t) s.out*s.width*s.height*s.count, elements = (int64_t) s.in*s.out*s.side*s.side;
        float * x     = random(ins, 1, 1.0f);
        float * bias  = random(s.out, 2, 1.0f);
        float * added = random(outs, 3, 1.0f);
        float * w32   = random(elements, 4, 1.7f / std::sqrt((float) s.in*s.side*s.side));
        half * w;
        OK(cudaMalloc(&w, elements*sizeof(half)));
        halve<<<(unsigned) ((elements + 255) / 256), 256>>>(w32, w, elements);
        ggml_tensor picture = tensor(GGML_TYPE_F32, s.width, s.height, s.in, s.count, x);
        ggml_tensor kernel  = tensor(s.is_f32 ? GGML_TYPE_F32 : GGML_TYPE_F16, s.side, s.side, s.in, s.out, s.is_f32 ? (void *) w32 : w);
        ggml_tensor conv    = tensor(GGML_TYPE_F32, s.width, s.height, s.out, s.count, nullptr);
        conv.src[0] = &kernel;
        conv.src[1] = &picture;
        const int32_t parameters[7] = {1, 1, s.side/2, s.side/2, 1, 1, 0};
        memcpy(conv.op_params, parameters, sizeof(parameters));
        OK(cudaMalloc(&conv.data, conv2d_wgmma::get_alloc_size(&conv) + 128));
        float * y = (float *) conv.data;
        // beyond the result lie packed picture and kernel; what is outside must stay as it is
        OK(cudaMemset(y, 0xFF, outs*sizeof(float)));

        const conv2d_wgmma::ending end = {bias, {added, nullptr}};
        if (!conv2d_wgmma::compute(&conv, y, end, 0)) {
            printf("refused\n");
            return 2;
        }
        OK(cudaDeviceSynchronize());

        std::mt19937_64 random_numbers(5);
        const int samples = 4096;
        std::vector<int64_t> which(samples);
        for (int i = 0; i < samples; ++i) {
            // the last pixels too
            which[i] = i < 512 ? outs - 1 - i : i < 1024 ? i - 512 : random_numbers() % outs;
            which[i] = std::max<int64_t>(0, std::min(which[i], outs - 1));
        }
        int64_t * which_at;
        double * expected_at;
        OK(cudaMalloc(&which_at, samples*sizeof(int64_t)));
        OK(cudaMalloc(&expected_at, samples*sizeof(double)));
        OK(cudaMemcpy(which_at, which.data(), samples*sizeof(int64_t), cudaMemcpyHostToDevice));
        reference<<<samples/64, 64>>>(x, w, w32, bias, added, expected_at, which_at, samples, s);
        std::vector<double> expected(samples);
        OK(cudaMemcpy(expected.data(), expected_at, samples*sizeof(double), cudaMemcpyDeviceToHost));
        std::vector<float> result(outs);
        OK(cudaMemcpy(result.data(), y, outs*sizeof(float), cudaMemcpyDeviceToHost));
        double wrong = 0.0, all = 0.0, largest = 0.0;
        for (int i = 0; i < samples; ++i) {
            const double difference = result[which[i]] - expected[i];
            wrong += difference*difference;
            all += expected[i]*expected[i];
            largest = std::max(largest, std::isfinite(difference) ? std::abs(difference) : INFINITY);
        }
        for (const float value : result) {
            if (!std::isfinite(value)) {
                largest = INFINITY;
            }
        }
        const double error = std::sqrt(wrong / all);
        good = good && error <= 1e-3 && std::isfinite(largest);

        const float whole   = median_ms([&] { conv2d_wgmma::compute(&conv, y, end, 0); });
        const float product = median_ms([&] { conv2d_wgmma::multiply_packed(&conv, {&picture, 1, {}}, conv2d_wgmma::picture_scratch(&conv), y, end, 0); });
        const double flops  = 2.0*outs*s.in*s.side*s.side;
        printf("%3s%6d%6d%5dx%4dx%d%6d%9.1e%10.1e%8.3f%8.0f%12.3f%10.0f\n", s.is_f32 ? "f32" : "f16", s.in, s.out, s.width, s.height, s.count, s.side, error, largest, whole, flops/whole*1e-9, product, flops/product*1e-9);
        for (void * at : {(void *) x, (void *) bias, (void *) added, (void *) w32, (void *) w, conv.data, (void *) which_at, (void *) expected_at}) {
            OK(cudaFree(at));
        }
    }
    return good ? 0 : 1;
}
