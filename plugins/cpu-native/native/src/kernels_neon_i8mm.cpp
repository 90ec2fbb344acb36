#include "pick.hpp"
#include "vector_neon.hpp"

const q4::Kernels& q4::kernels_neon_i8mm() {
    static const Kernels kernels = [] {
        Kernels made = make_kernels<NeonI8mm>();
        made.pair_rows = NeonI8mm::pair_rows;
        return made;
    }();
    return kernels;
}
