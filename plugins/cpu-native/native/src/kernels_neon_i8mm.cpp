#include "kernel.hpp"
#include "quantize.hpp"
#include "vector_neon.hpp"

const q4::Kernels& q4::kernels_neon_i8mm() {
    static const Kernels kernels{kernel_for<NeonI8mm>, NeonI8mm::kMostRows, quantize_chunk<NeonI8mm>};
    return kernels;
}
