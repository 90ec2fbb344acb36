#include "pick.hpp"
#include "vector_avxvnni.hpp"

const q4::Kernels& q4::kernels_avxvnni() {
    static const Kernels kernels = make_kernels<AvxVnni>();
    return kernels;
}
