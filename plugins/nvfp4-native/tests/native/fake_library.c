/* A libNVFP4.so with something wrong, or nothing: FAKE_VERSION, FAKE_NO_VERSION, FAKE_MISSING, FAKE_WRONG, FAKE_FAILS.
 * What is right is handed on to the emulated library, whose path is given by the build. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#include "NVFP4.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION NVFP4_ABI_VERSION
#endif

static int calls = 0;
NVFP4_EXPORT int fake_calls(void) { return calls; }

#ifndef FAKE_NO_VERSION
int32_t NVFP4_abi_version(void) { return FAKE_VERSION; }
#endif

static void* real(const char* name) {
    static void* library = NULL;
    if (library == NULL) library = dlopen(FAKE_REAL, RTLD_NOW | RTLD_LOCAL);
    void* found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) abort();
    return found;
}

int32_t NVFP4_quantize(const void* x, int32_t x_type, int64_t m, int64_t k, int64_t row_step, const float* static_scale,
                       uint8_t* codes, uint8_t* scales, float* rows, void* stream) {
    typedef int32_t (*Function)(const void*, int32_t, int64_t, int64_t, int64_t, const float*, uint8_t*, uint8_t*, float*,
                                void*);
    Function function;
    *(void**)&function = real("NVFP4_quantize");
    ++calls;
    return function(x, x_type, m, k, row_step, static_scale, codes, scales, rows, stream);
}

#ifndef FAKE_MISSING
int32_t NVFP4_scaled_mm(const uint8_t* a_codes, const uint8_t* a_scales, const float* a_rows, const uint8_t* b_codes,
                        const uint8_t* b_scales, const float* b_global, int64_t global_count, int32_t global_divides,
                        const void* bias, void* out, int32_t out_type, int64_t m, int64_t n, int64_t padded_k,
                        void* stream) {
    typedef int32_t (*Function)(const uint8_t*, const uint8_t*, const float*, const uint8_t*, const uint8_t*, const float*,
                                int64_t, int32_t, const void*, void*, int32_t, int64_t, int64_t, int64_t, void*);
    Function function;
    *(void**)&function = real("NVFP4_scaled_mm");
    ++calls;
#ifdef FAKE_FAILS
    return 700; /* cudaErrorIllegalAddress */
#endif
    const int32_t status = function(a_codes, a_scales, a_rows, b_codes, b_scales, b_global, global_count, global_divides,
                                    bias, out, out_type, m, n, padded_k, stream);
#ifdef FAKE_WRONG
    if (out_type == NVFP4_FLOAT32) ((float*)out)[m * n - 1] *= 1.01f; /* one element, one per cent */
#endif
    return status;
}
#endif

int32_t NVFP4_can_use_managed(int32_t device) { return device == 0; }
int32_t NVFP4_is_managed_tensor(const void* address) { return address != NULL && *(const uint8_t*)address == 77; }
int32_t NVFP4_to_managed(const void* source, int64_t bytes, int32_t device, void** managed, void* stream) {
    (void)device;
    (void)stream;
    if (source == NULL || bytes < 1) return NVFP4_BAD_ARGUMENT;
    uint8_t* made = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; ++i) made[i] = 77;
    *managed = made;
    return NVFP4_OK;
}
int32_t NVFP4_managed_prefetch(const void* address, int64_t bytes, int32_t device, void* stream) {
    (void)stream;
    return address != NULL && bytes > 0 && device >= -1 ? NVFP4_OK : NVFP4_BAD_ARGUMENT;
}
