#include "pick.hpp"
#include "vector_neon.hpp"

const q4::Kernels& q4::kernels_neon_i8mm() {
    static const Kernels kernels = make_kernels<NeonI8mm>();
    return kernels;
}
