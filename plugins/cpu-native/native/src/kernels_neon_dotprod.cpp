#include "kernel.hpp"
#include "quantize.hpp"
#include "vector_neon.hpp"

const q4::Kernels& q4::kernels_neon_dotprod() {
    static const Kernels kernels{kernel_for<NeonDotprod>, NeonDotprod::kMostRows, quantize_chunk<NeonDotprod>};
    return kernels;
}
