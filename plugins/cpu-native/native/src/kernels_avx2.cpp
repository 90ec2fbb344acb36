#include "pick.hpp"
#include "vector_avx2.hpp"

const q4::Kernels& q4::kernels_avx2() {
    static const Kernels kernels = [] {
        Kernels made = make_kernels<Avx2>();
        made.arrange_single = Avx2::arrange_single;
        return made;
    }();
    return kernels;
}
