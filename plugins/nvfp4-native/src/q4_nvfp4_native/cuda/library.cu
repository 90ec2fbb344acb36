// libNVFP4.so: the ABI of NVFP4.h over the kernels of this folder.
//
//   nvcc -shared -Xcompiler -fPIC,-fvisibility=hidden -std=c++17 -O3 -fmad=false
//     -gencode arch=compute_120a,code=sm_120a -gencode arch=compute_121a,code=sm_121a -o libNVFP4.so library.cu
//
// It needs the runtime API of CUDA 13: there cudaMemAdvise and cudaMemPrefetchAsync take a cudaMemLocation. The library
// brings that runtime with it, which in turn asks for a driver of CUDA 13.
#include "NVFP4.h"
#include "kernels.cuh"

namespace {

constexpr int64 kMost = 2147483647;

#ifdef Q4_EMULATED

template <typename Call>
int32_t launch(void (*kernel)(Call), int64 blocks, int threads, int shared_bytes, void*, const Call& call) {
    emulator::run([&] { kernel(call); }, blocks, threads, shared_bytes);
    return NVFP4_OK;
}

#else

#if CUDART_VERSION < 13000
#error "libNVFP4 needs CUDA 13: older runtimes know no cudaMemLocation in cudaMemAdvise and cudaMemPrefetchAsync"
#endif

template <typename Call>
int32_t launch(void (*kernel)(Call), int64 blocks, int threads, int shared_bytes, void* stream, const Call& call) {
    constexpr int without_asking = 49152;
    if (shared_bytes > without_asking) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return error;
    }
    // The launch's own status: cudaGetLastError() would give, and clear, what another call has left there.
    void* arguments[] = {const_cast<Call*>(&call)};
    const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared_bytes,
                            static_cast<cudaStream_t>(stream));
}

#endif

template <typename T>
int32_t multiply(void (*kernel)(Q4Gemm), const Q4Gemm& call, void* stream) {
    const int64 tiles = static_cast<int64>((call.m + T::BM - 1) / T::BM) * ((call.n + T::BN - 1) / T::BN);
    if (tiles > kMost) return NVFP4_BAD_ARGUMENT;
    return launch(kernel, tiles, T::THREADS, T::SHARED_BYTES, stream, call);
}

bool is_type(int32_t type) { return type >= NVFP4_FLOAT32 && type <= NVFP4_FLOAT16; }

}  // namespace

int32_t NVFP4_abi_version(void) { return NVFP4_ABI_VERSION; }

int32_t NVFP4_quantize(const void* x, int32_t x_type, int64_t m, int64_t k, int64_t row_step, const float* static_scale,
                       uint8_t* codes, uint8_t* scales, float* rows, void* stream) {
    const bool is_legal = x != nullptr && codes != nullptr && scales != nullptr && rows != nullptr && is_type(x_type) &&
                          m >= 1 && m <= kMost && k >= 1 && k <= kMost - 127 && (m == 1 || row_step >= k);
    if (!is_legal) return NVFP4_BAD_ARGUMENT;
    const Q4Quantize call = {x, codes, scales, rows, static_scale, row_step, static_cast<int>(m), static_cast<int>(k),
                             x_type};
    return launch(q4_quantize_nvfp4, m, 256, 32, stream, call);
}

int32_t NVFP4_scaled_mm(const uint8_t* a_codes, const uint8_t* a_scales, const float* a_rows, const uint8_t* b_codes,
                        const uint8_t* b_scales, const float* b_global, int64_t global_count, int32_t global_divides,
                        const void* bias, void* out, int32_t out_type, int64_t m, int64_t n, int64_t padded_k,
                        void* stream) {
    const bool has_operands = a_codes != nullptr && a_scales != nullptr && a_rows != nullptr && b_codes != nullptr &&
                              b_scales != nullptr && out != nullptr;
    const bool has_global = global_count == 0 || (b_global != nullptr && (global_count == 1 || global_count == n));
    const bool is_legal = has_operands && has_global && is_type(out_type) && m >= 1 && m <= kMost && n >= 1 &&
                          n <= kMost && padded_k >= 128 && padded_k <= kMost && padded_k % 128 == 0;
    if (!is_legal) return NVFP4_BAD_ARGUMENT;
    const Q4Gemm call = {a_codes, a_scales, a_rows, b_codes, b_scales, global_count == 0 ? nullptr : b_global, bias, out,
                         static_cast<int>(m), static_cast<int>(n), static_cast<int>(padded_k), global_count > 1,
                         global_divides != 0, out_type};
#define Q4_CONFIGURATION(name, most_rows, ...) \
    if (m <= most_rows) return multiply<Tile<__VA_ARGS__, E4m3>>(q4_gemm_nvfp4_##name, call, stream);
#include "configurations.cuh"
#undef Q4_CONFIGURATION
    return NVFP4_NOT_SUPPORTED;
}

#ifdef Q4_EMULATED

int32_t NVFP4_can_use_managed(int32_t) { return 0; }
int32_t NVFP4_is_managed_tensor(const void*) { return 0; }
int32_t NVFP4_to_managed(const void*, int64_t, int32_t, void**, void*) { return NVFP4_NOT_SUPPORTED; }
int32_t NVFP4_managed_prefetch(const void*, int64_t, int32_t, void*) { return NVFP4_NOT_SUPPORTED; }

#else

int32_t NVFP4_can_use_managed(int32_t device) {
    int value = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&value, cudaDevAttrConcurrentManagedAccess, device);
    return error == cudaSuccess && value != 0;
}

int32_t NVFP4_is_managed_tensor(const void* address) {
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) return 0;
    return attributes.type == cudaMemoryTypeManaged;
}

int32_t NVFP4_to_managed(const void* source, int64_t bytes, int32_t device, void** managed, void* stream) {
    if (source == nullptr || managed == nullptr || bytes < 1) return NVFP4_BAD_ARGUMENT;
    if (!NVFP4_can_use_managed(device)) return NVFP4_NOT_SUPPORTED;
    void* made = nullptr;
    cudaError_t error = cudaMallocManaged(&made, static_cast<size_t>(bytes));
    if (error != cudaSuccess) return error;
    const cudaMemLocation place = {cudaMemLocationTypeDevice, device};
    const cudaStream_t queue = static_cast<cudaStream_t>(stream);
    error = cudaMemAdvise(made, static_cast<size_t>(bytes), cudaMemAdviseSetPreferredLocation, place);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(made, source, static_cast<size_t>(bytes), cudaMemcpyDefault, queue);
    if (error == cudaSuccess) error = cudaStreamSynchronize(queue);
    if (error != cudaSuccess) {
        cudaFree(made);
        return error;
    }
    *managed = made;
    return NVFP4_OK;
}

int32_t NVFP4_managed_prefetch(const void* address, int64_t bytes, int32_t device, void* stream) {
    if (address == nullptr || bytes < 1 || device < -1) return NVFP4_BAD_ARGUMENT;
    const cudaMemLocation place = {device < 0 ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice,
                                   device < 0 ? 0 : device};
    return cudaMemPrefetchAsync(address, static_cast<size_t>(bytes), place, 0, static_cast<cudaStream_t>(stream));
}

#endif
