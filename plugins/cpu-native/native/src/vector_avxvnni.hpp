// 8 rows at once: AVX2 with the dot products of AVX-VNNI.
#pragma once

#include "vector_avx2.hpp"

namespace q4 {
namespace {

struct AvxVnni : Avx2 {
    static constexpr int kKinds = 1, kNarrow = 0, kWide = 0, kShort = -1, kBytes = 3;  // one instruction serves all levels
    static constexpr bool kIsWideSigned = false;
    static constexpr bool kHasSingle = false;  // not measured

    template <int Kind> struct Levels : Avx2::Levels<Kind == kBytes ? Avx2::kBytes : Avx2::kNarrow> {
        using Avx2::Levels<Kind == kBytes ? Avx2::kBytes : Avx2::kNarrow>::Levels;
    };
    static Ints byte_levels(Ints line) { return _mm256_xor_si256(line, _mm256_set1_epi8(-128)); }
    template <int Kind> struct Dot {
        static constexpr bool kIsPaired = false;
        __m256i sum;
        void begin(int32_t start) { sum = _mm256_set1_epi32(start); }
        void add(Ints levels, const int8_t* x) {
            int32_t four;
            __builtin_memcpy(&four, x, 4);
            sum = _mm256_dpbusd_avx_epi32(sum, levels, _mm256_set1_epi32(four));
        }
        void half() {}
        Floats floats() { return _mm256_cvtepi32_ps(sum); }
    };
    static constexpr int kMostByteBits = 5;  // 6-bit codes gain nothing
    struct ByteDot {
        __m256i lower, upper;
        void begin(int32_t start) {
            lower = _mm256_set1_epi32(start);
            upper = _mm256_setzero_si256();
        }
        void add(Ints levels, const int8_t* low, const int8_t* high) {
            int32_t four, above;
            __builtin_memcpy(&four, low, 4), __builtin_memcpy(&above, high, 4);
            lower = _mm256_dpbusd_avx_epi32(lower, _mm256_set1_epi32(four), levels);
            upper = _mm256_dpbusd_avx_epi32(upper, levels, _mm256_set1_epi32(above));
        }
        void half() {}
        Floats floats() const { return _mm256_cvtepi32_ps(_mm256_add_epi32(lower, _mm256_slli_epi32(upper, 8))); }
    };
    template <int Kind, int Rows> using Dots = std::conditional_t<Kind == kBytes, ByteRow<ByteDot>, EachRow<Dot<Kind>, Rows>>;
    static Sums dot_pair(Sums sum, Ints pair, const int8_t* x) { return _mm256_dpwssd_avx_epi32(sum, pair, two_levels(x)); }
};

}  // namespace
}  // namespace q4
