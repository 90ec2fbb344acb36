#include "pick.hpp"
#include "vector_neon.hpp"

const q4::Kernels& q4::kernels_neon_dotprod() {
    static const Kernels kernels = make_kernels<NeonDotprod>();
    return kernels;
}
