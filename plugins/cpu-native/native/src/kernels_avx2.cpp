#include "kernel.hpp"
#include "quantize.hpp"
#include "vector_avx2.hpp"

const q4::Kernels& q4::kernels_avx2() {
    static const Kernels kernels{kernel_for<Avx2>, Avx2::kMostRows, quantize_chunk<Avx2>};
    return kernels;
}
