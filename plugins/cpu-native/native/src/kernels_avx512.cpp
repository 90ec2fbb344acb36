#include "pick.hpp"
#include "vector_avx512.hpp"

const q4::Kernels& q4::kernels_avx512() {
    static const Kernels kernels = make_kernels<Avx512>();
    return kernels;
}
