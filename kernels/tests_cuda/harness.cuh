// What the check and bench programs share: device buffers, kernels loaded from the built fatbins, timing, tables.
#pragma once
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>
#include "../common/formats.cuh"

#define CUDA(x)                                                                                                   \
    do {                                                                                                          \
        cudaError_t e_ = (x);                                                                                     \
        if (e_ != cudaSuccess) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));                   \
            exit(1);                                                                                              \
        }                                                                                                         \
    } while (0)

template <typename... A>
std::string fmt(const char* f, A... a) { char s[160]; snprintf(s, sizeof s, f, a...); return s; }

inline std::string g_dir = ".";
inline cudaStream_t g_stream = nullptr;

// A kernel of a module by name: "quant/fp8_linear:fp8_linear_m8_t1" or "module" when both are one stem.
inline cudaKernel_t kernel(const std::string& path) {
    static std::map<std::string, cudaLibrary_t> libs;
    static std::map<std::string, cudaKernel_t> kernels;
    auto it = kernels.find(path);
    if (it != kernels.end()) return it->second;
    size_t c = path.find(':');
    std::string mod = path.substr(0, c), stem = mod.substr(mod.find('/') + 1), name = c == std::string::npos ? stem : path.substr(c + 1);
    if (!libs.count(stem)) CUDA(cudaLibraryLoadFromFile(&libs[stem], (g_dir + "/" + stem + ".fatbin").c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    cudaKernel_t k;
    if (cudaLibraryGetKernel(&k, libs[stem], name.c_str()) != cudaSuccess) {
        fprintf(stderr, "no kernel %s in %s\n", name.c_str(), stem.c_str());
        exit(1);
    }
    return kernels[path] = k;
}
// How a launch differs from a plain one.
struct Form {
    int cluster = 1;
    bool cooperative = false;  // all blocks at once, so that they may wait for each other
    bool overlap = false;      // begins before the kernel ahead of it has ended
};
inline bool g_overlap = false;  // launches that do not say otherwise
template <typename... A>
void launch_as(Form form, const std::string& path, dim3 grid, dim3 block, size_t smem, A... args) {
    cudaKernel_t k = kernel(path);
    if (smem > 48 * 1024) CUDA(cudaFuncSetAttribute((const void*)k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem));
    void* p[] = {(void*)&args...};
    cudaLaunchAttribute attrs[3];
    cudaLaunchConfig_t config = {grid, block, smem, g_stream, attrs, 0};
    auto attr = [&](cudaLaunchAttributeID id) { attrs[config.numAttrs].id = id; return &attrs[config.numAttrs++].val; };
    if (form.cluster > 1) {
        auto* v = attr(cudaLaunchAttributeClusterDimension);
        v->clusterDim.x = form.cluster;
        v->clusterDim.y = v->clusterDim.z = 1;
    }
    if (form.cooperative) attr(cudaLaunchAttributeCooperative)->cooperative = 1;
    if (form.overlap) attr(cudaLaunchAttributeProgrammaticStreamSerialization)->programmaticStreamSerializationAllowed = 1;
    CUDA(cudaLaunchKernelExC(&config, (const void*)k, p));
}
template <typename... A>
void launch(const std::string& path, dim3 grid, dim3 block, size_t smem, A... args) { launch_as({1, false, g_overlap}, path, grid, block, smem, args...); }
template <typename... A>
void launch_cooperative(const std::string& path, dim3 grid, dim3 block, size_t smem, A... args) { launch_as({1, true, g_overlap}, path, grid, block, smem, args...); }

// fp8_few in clusters of `ks`: its grid and shared memory.
inline size_t few_smem(int K, int ks, int m, bool plain) { return (m == 1 ? 4 : 5) * 16384 + 4 * (((K + 127) / 128 + ks - 1) / ks) * ((plain ? 68 : 36) * m + 16) + std::max(128, 48 * m); }
template <typename... A>
void launch_few(int ks, int m, bool plain, int G, int M, int N, int K, A... args) {
    launch_as({ks, false, g_overlap}, fmt("quant/fp8_few_sm90:fp8_few_%sm%d", plain ? "plain_" : "", m), dim3((N + 127) / 128 * ks, G), 256, few_smem(K, ks, m, plain), args..., M, N, K);
}
// Blocks that share the columns of fp8_few, as launches choose them: as many as all fit at once.
inline int few_split(int m, bool plain, int N, int K, int G) {
    int tiles = (N + 127) / 128 * G, stages = (K + 127) / 128;
    cudaKernel_t k = kernel(fmt("quant/fp8_few_sm90:fp8_few_%sm%d", plain ? "plain_" : "", m));
    auto fit = [&](int ks) {
        size_t smem = few_smem(K, ks, m, plain);
        if (smem > 232448) return 0;
        CUDA(cudaFuncSetAttribute((const void*)k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem));
        cudaLaunchAttribute attr;
        attr.id = cudaLaunchAttributeClusterDimension;
        attr.val.clusterDim.x = ks;
        attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {dim3(ks), 256, smem, 0, &attr, 1};
        int n = 0;
        CUDA(cudaOccupancyMaxActiveClusters(&n, (const void*)k, &config));
        return n;
    };
    if (stages >= 8 && 2 * tiles <= fit(8)) return 8;
    for (int ks = std::min(m == 1 ? 6 : 5, stages); ks > 1; --ks)
        if (tiles <= fit(ks)) return ks;
    return fit(1) ? 1 : 2;
}

// Shared memory of experts_one: as many stages as fit.
inline size_t one_smem(size_t dim, size_t inter, size_t k) {
    size_t stage = 17 * std::max(dim, inter) / 2, rest = 8 * 1280 + (dim + k * inter) / 8 * 9 + 2 * inter;
    return rest + std::min<size_t>(8, (230000 - rest) / stage) * stage;
}

template <typename T>
struct Dev {
    T* p = nullptr;
    size_t n = 0;
    Dev() = default;
    explicit Dev(size_t n) : n(n) { CUDA(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T) + 256)); poison(); }
    Dev(const std::vector<T>& v) : Dev(v.size()) { CUDA(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice)); }
    Dev(const Dev&) = delete;
    Dev(Dev&& o) : p(o.p), n(o.n) { o.p = nullptr; }
    Dev& operator=(Dev&& o) { std::swap(p, o.p); std::swap(n, o.n); return *this; }
    ~Dev() { if (p) cudaFree(p); }
    void poison() { CUDA(cudaMemset(p, 0xff, n * sizeof(T))); }
    void zero() { CUDA(cudaMemset(p, 0, n * sizeof(T))); }
    std::vector<T> get() const {
        std::vector<T> v(n);
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    operator T*() const { return p; }
};

inline std::mt19937_64 g_rng(std::random_device{}());
inline float uniform(float lo, float hi) { return std::uniform_real_distribution<float>(lo, hi)(g_rng); }
inline int pick(int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(g_rng); }
inline float normal() { static std::normal_distribution<float> d; return d(g_rng); }

// ---- random data made on the device ----
__device__ __forceinline__ uint32_t hash_u32(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdULL; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ULL; x ^= x >> 33;
    return (uint32_t)x;
}
__global__ void fill_bf16(bf16* p, size_t n, uint64_t seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        float u = (hash_u32(seed * 0x9e3779b97f4a7c15ULL + i) >> 8) * 0x1p-24f + 0x1p-25f, v = (hash_u32(seed * 0x9e3779b97f4a7c15ULL + i + (1ull << 40)) >> 8) * 0x1p-24f;
        p[i] = __float2bfloat16_rn(scale * sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v));
    }
}
__global__ void fill_f32(float* p, size_t n, uint64_t seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = scale * ((int)(hash_u32(seed * 0x9e3779b97f4a7c15ULL + i) >> 8) - 8388608) * 0x1p-23f;
}
// kind 0: any byte; 1: e4m3 codes without NaN; 2: e8m0 scales 2^-9..2^0
__global__ void fill_u8(uint8_t* p, size_t n, uint64_t seed, int kind) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t r = hash_u32(seed * 0x9e3779b97f4a7c15ULL + i);
        p[i] = kind == 0 ? r : kind == 1 ? ((r & 0x7f) == 0x7f ? r ^ 1 : r) : 118 + r % 10;
    }
}
inline uint64_t next_seed() { return g_rng(); }
inline Dev<bf16> rand_bf16(size_t n, float scale = 1.0f) { Dev<bf16> d(n); fill_bf16<<<1024, 256>>>(d, n, next_seed(), scale); CUDA(cudaDeviceSynchronize()); return d; }
inline Dev<float> rand_f32(size_t n, float scale = 1.0f) { Dev<float> d(n); fill_f32<<<1024, 256>>>(d, n, next_seed(), scale); CUDA(cudaDeviceSynchronize()); return d; }
inline Dev<uint8_t> rand_u8(size_t n, int kind) { Dev<uint8_t> d(n); fill_u8<<<1024, 256>>>(d, n, next_seed(), kind); CUDA(cudaDeviceSynchronize()); return d; }

// ---- comparison ----
// One rounding to bf16 is at most 2^-8 of a value, whatever the sums before it did.
constexpr double ONE_ROUNDING = 0x1p-8;
inline int g_failed = 0, g_checks = 0;
inline void report(const std::string& op, const std::string& shape, bool ok, const std::string& what) {
    ++g_checks;
    g_failed += !ok;
    printf("%-4s %-22s %-46s %s\n", ok ? "ok" : "FAIL", op.c_str(), shape.c_str(), what.c_str());
    fflush(stdout);
}
inline float to_f(float v) { return v; }
inline float to_f(bf16 v) { return __bfloat162float(v); }
// ||got - want|| / ||want||; NaN anywhere fails.
template <typename A, typename B>
double rel_error(const std::vector<A>& got, const std::vector<B>& want) {
    double num = 0, den = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        double g = to_f(got[i]), w = to_f(want[i]);
        if (!(g == g)) return INFINITY;
        num += (g - w) * (g - w);
        den += w * w;
    }
    return den > 0 ? sqrt(num / den) : (num > 0 ? INFINITY : 0);
}
template <typename A, typename B>
void near(const std::string& op, const std::string& shape, const std::vector<A>& got, const std::vector<B>& want, double tol) {
    double e = rel_error(got, want);
    char s[64];
    snprintf(s, sizeof s, "rel %.2e (<= %.0e)", e, tol);
    report(op, shape, e <= tol, s);
}
template <typename T>
void same(const std::string& op, const std::string& shape, const std::vector<T>& got, const std::vector<T>& want) {
    size_t bad = 0, first = 0;
    for (size_t i = 0; i < want.size(); ++i)
        if (memcmp(&got[i], &want[i], sizeof(T))) { if (!bad) first = i; ++bad; }
    char s[96];
    snprintf(s, sizeof s, bad ? "%zu of %zu differ, first at %zu" : "exact", bad, want.size(), first);
    report(op, shape, bad == 0 && got.size() == want.size(), s);
}

// ---- timing: median over replays of a graph of `reps` calls; call i gets its index, to rotate buffers ----
inline double graph_us(const std::function<void(int)>& fn, int reps = 20, int replays = 15) {
    cudaStream_t s;
    CUDA(cudaStreamCreate(&s));
    cudaStream_t old = g_stream;
    g_stream = s;
    fn(0);
    CUDA(cudaStreamSynchronize(s));
    cudaGraph_t g;
    cudaGraphExec_t ge;
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < reps; ++i) fn(i);
    CUDA(cudaStreamEndCapture(s, &g));
    if (g_overlap) {
        size_t n = 0, early = 0;
        CUDA(cudaGraphGetEdges(g, nullptr, nullptr, nullptr, &n));
        std::vector<cudaGraphNode_t> from(n), to(n);
        std::vector<cudaGraphEdgeData> data(n);
        CUDA(cudaGraphGetEdges(g, from.data(), to.data(), data.data(), &n));
        for (auto& d : data) early += d.type == cudaGraphDependencyTypeProgrammatic;
        if (early + 1 < n) printf("%zu of %zu edges let the next kernel begin early\n", early, n);
    }
    CUDA(cudaGraphInstantiate(&ge, g, 0));
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    std::vector<double> t;
    for (int i = 0; i < replays + 2; ++i) {
        CUDA(cudaEventRecord(a, s));
        CUDA(cudaGraphLaunch(ge, s));
        CUDA(cudaEventRecord(b, s));
        CUDA(cudaEventSynchronize(b));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, a, b));
        if (i >= 2) t.push_back(ms * 1000.0 / reps);
    }
    CUDA(cudaGraphExecDestroy(ge));
    CUDA(cudaGraphDestroy(g));
    g_stream = old;
    CUDA(cudaStreamDestroy(s));
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}
// Ceilings measured on an H200: bytes read + written of a large copy, and a large bf16 product.
constexpr double CEIL_GBS = 4270.0, CEIL_TFLOPS = 790.0;
inline void row(const char* op, const std::string& shape, double us, double bytes, double flops) {
    double gbs = bytes / us / 1e3, tf = flops / us / 1e6, pb = gbs / CEIL_GBS * 100, pf = tf / CEIL_TFLOPS * 100;
    printf("%-18s %-34s %9.2f us %8.1f GB/s %5.1f%% %8.1f TFLOP/s %5.1f%%\n", op, shape.c_str(), us, gbs, pb, tf, pf);
    fflush(stdout);
}
