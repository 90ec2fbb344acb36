#include "pick.hpp"
#include "vector_avx2.hpp"

const q4::Kernels& q4::kernels_avx2() {
    static const Kernels kernels = make_kernels<Avx2>();
    return kernels;
}
