// 8 rows at once: AVX2 with the dot products of AVX-VNNI.
#pragma once

#include "vector_avx2.hpp"

namespace q4 {
namespace {

struct AvxVnni : Avx2 {
    // Four products are summed in 32 bits at once: nothing saturates, so wide levels need no splitting.
    struct Dot {
        __m256i sum = _mm256_setzero_si256();
        template <bool Narrow> void add(Ints levels, const int8_t* x) {
            int32_t four;
            __builtin_memcpy(&four, x, 4);
            sum = _mm256_dpbusd_avx_epi32(sum, levels, _mm256_set1_epi32(four));
        }
        template <bool Narrow> void half() {}
        Floats floats() const { return _mm256_cvtepi32_ps(sum); }
    };
    template <int Rows> using Dots = EachRow<Dot, Rows>;
};

}  // namespace
}  // namespace q4
