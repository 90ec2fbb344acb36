// One library that is, for tests, both libNVFP4.so and the CUDA driver, over the kernels compiled for the CPU.
//
//   g++ -std=c++17 -O2 -ffp-contract=off -shared -fPIC -DQ4_EMULATED -I<this folder> -I<the kernels' folder> ...
#include "library.cu"

#include <string>

namespace {

using Runner = void (*)(void**, int64, int, int);

struct Kernel {
    const char* name;
    Runner run;
};

void set_readable(const Q4Quantize&, int) { emulator::readable.clear(); }
void set_readable(const Q4Gemm& call, int block) {
    const int64 row = call.k / 2, scales = call.k / block;
    emulator::readable = {{call.a_codes, call.m * row}, {call.a_scales, call.m * scales},
                          {call.b_codes, call.n * row}, {call.b_scales, call.n * scales}};
}

template <typename Call, void (*kernel)(Call), int block>
void run_kernel(void** arguments, int64 blocks, int threads, int shared_bytes) {
    const Call call = *static_cast<const Call*>(arguments[0]);
    set_readable(call, block);
    emulator::run([&] { kernel(call); }, blocks, threads, shared_bytes);
    emulator::readable.clear();
}

bool has_context = true;

const Kernel kernels[] = {
    {"q4_quantize_nvfp4", run_kernel<Q4Quantize, q4_quantize_nvfp4, 16>},
    {"q4_quantize_mxfp4", run_kernel<Q4Quantize, q4_quantize_mxfp4, 32>},
#define Q4_CONFIGURATION(name, most_rows, ...)                                    \
    {"q4_gemm_nvfp4_" #name, run_kernel<Q4Gemm, q4_gemm_nvfp4_##name, 16>},           \
    {"q4_gemm_mxfp4_" #name, run_kernel<Q4Gemm, q4_gemm_mxfp4_##name, 32>},
#include "configurations.cuh"
#undef Q4_CONFIGURATION
};

}  // namespace

extern "C" {

void emulator_set(int copies, int is_backwards) {
    emulator::manner.copies = copies;
    emulator::manner.is_backwards = is_backwards;
}

// Bytes of shared memory and threads of a configuration, as the kernels have them.
int emulator_shape(const char* name, int is_mxfp4, int* shared_bytes, int* threads) {
#define Q4_CONFIGURATION(own, most_rows, ...)                                                                    \
    if (std::string(name) == #own) {                                                                             \
        *shared_bytes = is_mxfp4 ? Tile<__VA_ARGS__, E8m0>::SHARED_BYTES : Tile<__VA_ARGS__, E4m3>::SHARED_BYTES; \
        *threads = Tile<__VA_ARGS__, E4m3>::THREADS;                                                             \
        return 0;                                                                                                \
    }
#include "configurations.cuh"
#undef Q4_CONFIGURATION
    return -1;
}

// How many asynchronous copies have read outside of their operand since this was last asked.
int emulator_violations() {
    return emulator::violations.exchange(0);
}

// From now on launches find no current context, as in a thread that has used no CUDA yet, until one is set.
void emulator_lose_context() { has_context = false; }

// What of the CUDA driver is used. Statuses are CUresult.
int cuModuleLoadData(void** module, const void* image) {
    if (std::memcmp(image, "not a cubin", 11) == 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
    *module = const_cast<Kernel*>(kernels);
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = &has_context;
    return 0;
}
int cuCtxSetCurrent(void* context) {
    if (context != &has_context) return 201;
    has_context = true;
    return 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    for (const Kernel& kernel : kernels) {
        if (std::string(kernel.name) == name) {
            *function = const_cast<Kernel*>(&kernel);
            return 0;
        }
    }
    return 500;  // CUDA_ERROR_NOT_FOUND
}
int cuFuncSetAttribute(void*, int attribute, int value) { return attribute == 8 && value <= 101376 ? 0 : 1; }
// CUlaunchConfig of cuda.h, 12.0 and later.
struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
    if (!has_context) return 201;  // CUDA_ERROR_INVALID_CONTEXT
    if (config->grid[1] != 1 || config->grid[2] != 1 || config->block[1] != 1 || config->block[2] != 1) return 1;
    if (config->attributes != nullptr || config->attribute_count != 0 || extra != nullptr) return 1;
    static_cast<Kernel*>(function)->run(arguments, config->grid[0], config->block[0], config->shared_bytes);
    return 0;
}
int cuGetErrorName(int status, const char** name) {
    *name = status == 200 ? "CUDA_ERROR_INVALID_IMAGE" : status == 500 ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}

}  // extern "C"
