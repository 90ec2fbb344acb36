#include "kernel.hpp"
#include "quantize.hpp"
#include "vector_avx512.hpp"

const q4::Kernels& q4::kernels_avx512() {
    static const Kernels kernels{kernel_for<Avx512>, Avx512::kMostRows, quantize_chunk<Avx512>};
    return kernels;
}
