// The kernels by the names under which they are found. Q4_NO_GEMM, Q4_NO_NVFP4 and Q4_NO_MXFP4 leave some out.
#pragma once

#include "gemm.cuh"
#include "quantize.cuh"

#define Q4_GEMM(name, scale, ...)                                                                    \
    Q4_KERNEL void __launch_bounds__(Tile<__VA_ARGS__, scale>::THREADS, 1) name(const Q4Gemm call) { \
        multiply_tile<Tile<__VA_ARGS__, scale>, scale>(call);                                        \
    }

#ifndef Q4_NO_NVFP4
#ifndef Q4_NO_GEMM  // block-scaled products exist on sm_120a and sm_121a alone
#define Q4_CONFIGURATION(name, most_rows, ...) Q4_GEMM(q4_gemm_nvfp4_##name, E4m3, __VA_ARGS__)
#include "configurations.cuh"
#undef Q4_CONFIGURATION
#endif
Q4_KERNEL void __launch_bounds__(256) q4_quantize_nvfp4(const Q4Quantize call) { quantize_row<E4m3Rule>(call); }
#endif

#ifndef Q4_NO_MXFP4
#ifndef Q4_NO_GEMM
#define Q4_CONFIGURATION(name, most_rows, ...) Q4_GEMM(q4_gemm_mxfp4_##name, E8m0, __VA_ARGS__)
#include "configurations.cuh"
#undef Q4_CONFIGURATION
#endif
Q4_KERNEL void __launch_bounds__(256) q4_quantize_mxfp4(const Q4Quantize call) { quantize_row<E8m0Rule>(call); }
#endif
