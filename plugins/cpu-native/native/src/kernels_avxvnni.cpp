#include "kernel.hpp"
#include "quantize.hpp"
#include "vector_avxvnni.hpp"

const q4::Kernels& q4::kernels_avxvnni() {
    static const Kernels kernels{kernel_for<AvxVnni>, AvxVnni::kMostRows, quantize_chunk<AvxVnni>};
    return kernels;
}
