/* The C ABI of libNVFP4.so, version 1.0: NVFP4 activations and block-scaled products on a CUDA device.
 *
 * A library that exports all seven functions is used before q4core's own kernels. Copyright: Apache-2.0, as q4core.
 *
 * Rules for every function
 *   - Pointers are device addresses unless said otherwise; the caller owns all memory and keeps it until the stream
 *     has finished. Nothing is allocated (but by NVFP4_to_managed), nothing waits for the device, and nothing is written
 *     but the outputs named here, so that calls can be captured into a CUDA graph.
 *   - `stream` is a cudaStream_t (CUstream) of the current device; NULL is the default stream.
 *   - Calls from several threads at once are allowed.
 *   - Functions of type int32_t return NVFP4_OK, or a positive cudaError_t, or one of the negative codes below.
 *     An error writes nothing.
 *
 * Layouts
 *   P is K rounded up to a multiple of 128; what lies past K are zero codes.
 *   codes  [rows, P / 2]   uint8, row-major, 16-byte aligned: E2M1, even in-features in the lower nibble
 *   scales [rows, P / 16]  uint8, row-major, 8-byte aligned: E4M3 without sign, one for 16 in-features
 */
#ifndef NVFP4_H
#define NVFP4_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define NVFP4_EXPORT __declspec(dllexport)
#else
#define NVFP4_EXPORT __attribute__((visibility("default")))
#endif

#define NVFP4_ABI_VERSION 0x00010000 /* major << 16 | minor: another major version is another ABI */

enum { NVFP4_FLOAT32 = 0, NVFP4_BFLOAT16 = 1, NVFP4_FLOAT16 = 2 };
enum { NVFP4_OK = 0, NVFP4_BAD_ARGUMENT = -1, NVFP4_NOT_SUPPORTED = -2 };

/* Returns NVFP4_ABI_VERSION of the header that the library was built with. The only function that is called before the
 * version is known to fit. */
NVFP4_EXPORT int32_t NVFP4_abi_version(void);

/* Rounds activations to NVFP4 with one scale a row.
 *   x            [m, k] of x_type, elements of a row side by side, rows `row_step` elements apart
 *   static_scale one positive float, the checkpoint's activation scale; NULL: each row gets its own
 *   codes, scales, rows   outputs; rows [m] float32, so that x[i, j] ~ code * scale * rows[i]
 * Values that lie on a grid of (E2M1 value) * (power of two), with a largest one in each block of 16 and one power of two
 * in each row, must be preserved exactly; under a static scale those whose power of two is 2^-6 ... 2^8 times the smallest one that
 * is not below the scale. A row that holds NaN or an infinity gets rows[i] = NaN. */
NVFP4_EXPORT int32_t NVFP4_quantize(const void* x, int32_t x_type, int64_t m, int64_t k, int64_t row_step,
                                    const float* static_scale, uint8_t* codes, uint8_t* scales, float* rows,
                                    void* stream);

/* out[i, j] = a_rows[i] * global(j) * sum over p of a[i, p] * b[j, p]  +  bias[j], sums in float32, one rounding to out.
 *   b_global       global_count floats: 0 (and NULL; the factor is 1), 1 (for all rows of b) or n (one for each)
 *   global_divides 0: the factor is b_global; 1: it is 1 / b_global
 *   bias           [n] of out_type, or NULL
 *   out            [m, n] of out_type, row-major without gaps, any address that the type allows
 *   padded_k       P
 * Equal arguments give equal bits; a row of out depends on its own row of a alone. */
NVFP4_EXPORT int32_t NVFP4_scaled_mm(const uint8_t* a_codes, const uint8_t* a_scales, const float* a_rows,
                                     const uint8_t* b_codes, const uint8_t* b_scales, const float* b_global,
                                     int64_t global_count, int32_t global_divides, const void* bias, void* out,
                                     int32_t out_type, int64_t m, int64_t n, int64_t padded_k, void* stream);

/* Returns 1 if the device can use managed memory while the host does (cudaDevAttrConcurrentManagedAccess), else 0. */
NVFP4_EXPORT int32_t NVFP4_can_use_managed(int32_t device);

/* Returns 1 if the driver says that the address (host's or device's) is of managed memory, else 0. */
NVFP4_EXPORT int32_t NVFP4_is_managed_tensor(const void* address);

/* Copies `bytes` bytes, from host or device, into new managed memory that prefers `device`; *managed is its address, to be
 * given back with cudaFree. This waits for the copy. */
NVFP4_EXPORT int32_t NVFP4_to_managed(const void* source, int64_t bytes, int32_t device, void** managed, void* stream);

/* Moves managed memory to a device, or to the host where device is -1, in the order of the stream. */
NVFP4_EXPORT int32_t NVFP4_managed_prefetch(const void* address, int64_t bytes, int32_t device, void* stream);

#ifdef __cplusplus
}
#endif

#endif
