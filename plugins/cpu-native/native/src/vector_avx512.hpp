// 16 rows at once: AVX-512 F/BW/VL with VNNI.
#pragma once

#include <immintrin.h>

#include "dots.hpp"

namespace q4 {
namespace {

struct Avx512 {
    static constexpr int kLanes = 16;
    static constexpr int kDirectRows = 8;  // rows of x per pass: 8 sums, 8 dot products, and room for the codes
    static constexpr int kExactPanelRows = 12, kA8PanelRows = 12, kA16PanelRows = 12;
    static constexpr int kA8Parts = 1, kA16Parts = 1;
    // One operation decodes, so that the exact path gains nothing from a panel.
    static constexpr int64_t kExactPanelFrom = INT64_MAX, kA8PanelFrom = 48, kA16PanelFrom = 48;
    static constexpr int kKinds = 1, kNarrow = 0, kWide = 0, kShort = -1, kBytes = 1;  // one instruction serves all levels
    static constexpr bool kIsWideSigned = false;
    using Floats = __m512;
    using Ints = __m512i;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats splat(float v) { return _mm512_set1_ps(v); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats rounded(Floats v) {
        asm("" : "+v"(v));
        return v;
    }
    static uint32_t ones(Floats v) { return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GT_OQ); }
    static float sum(Floats v) { return _mm512_reduce_add_ps(v); }
    static void four_sums(Floats a, Floats b, Floats c, Floats d, float* to) {
        const auto fold = [](Floats v) __attribute__((always_inline)) {
            return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
        };
        const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    }
    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Floats v) { _mm512_storeu_ps(to, v); }
    static void store(uint8_t* to, Ints v) { _mm512_storeu_si512(to, v); }
    // The first lanes of a vector, fewer than all, and 0 behind them; nothing else is read or written.
    static Floats partial(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
    static void store_partial(float* to, Floats v, int64_t count) { _mm512_mask_storeu_ps(to, first_lanes(count), v); }
    static Floats most(Floats a, Floats b) { return _mm512_max_ps(a, b); }    // b where either is NaN
    static Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b where either is NaN
    static constexpr bool kHasPower = true;
    static Floats power(Floats v, Floats n) { return _mm512_scalef_ps(v, n); }  // v · 2^n
    static Floats reciprocal(Floats v) {  // of normal numbers, within a unit in the last place
        const __m512 near = _mm512_rcp14_ps(v);
        return _mm512_fmadd_ps(near, _mm512_fnmadd_ps(v, near, _mm512_set1_ps(1.0f)), near);
    }
    static Floats first_of(Floats v, int64_t count) { return _mm512_maskz_mov_ps(first_lanes(count), v); }
    static float largest(Floats v) { return _mm512_reduce_max_ps(v); }  // of no NaN
    static __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
    static void store_f16(uint8_t* to, Floats v) {
        const __m256i narrow = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
    }
    static void store_bf16(uint8_t* to, Floats v) {  // round to nearest even; a NaN keeps its topmost bits and stays one
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __m512i wide = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16)));
    }
    static int count_reaching(const float* x, int32_t least) {  // of 32 magnitudes, as bits
        uint32_t found = 0;
        for (int i = 0; i < 2; ++i) {
            const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(x + 16 * i), _mm512_set1_epi32(0x7fffffff));
            found |= uint32_t{_mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(least))} << 16 * i;
        }
        return __builtin_popcount(found);
    }
    // 32 numbers to int8, and the sums of both halves' levels; false where some may be outliers, or integers can't hold them.
    static constexpr bool kHasRuns = true;
    Q4_INLINE static bool quantize_plain(const float* x, int8_t* levels, float* scale, int32_t* sums) {
        const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
        const __m512i sign = _mm512_set1_epi32(0x7fffffff);
        const __m512i a = _mm512_and_si512(_mm512_castps_si512(low), sign), b = _mm512_and_si512(_mm512_castps_si512(high), sign);
        const int32_t most = _mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
        const __m512i least = _mm512_set1_epi32(most - kSixteenth);
        const uint32_t large = uint32_t{_mm512_cmpge_epi32_mask(a, least)} | uint32_t{_mm512_cmpge_epi32_mask(b, least)} << 16;
        float amax;
        __builtin_memcpy(&amax, &most, 4);
        *scale = amax / 127.0f;
        if (__builtin_popcount(large) <= kMostLarge || most > kHuge || !(*scale >= 1.1754944e-38f)) return false;
        const __m512 divisor = _mm512_set1_ps(*scale);
        const __m128i first = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(low, divisor)));
        const __m128i last = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(high, divisor)));
        const __m256i both = _mm256_set_m128i(last, first);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(levels), both);
        __m256i sum = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), both);
        sum = _mm256_hadd_epi32(sum, sum), sum = _mm256_hadd_epi32(sum, sum);
        sums[0] = _mm256_extract_epi32(sum, 0), sums[1] = _mm256_extract_epi32(sum, 4);
        return true;
    }
    static Ints line(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static Ints shifted(Ints v, int bits) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits)); }
    // Bits of each byte, moved down (or up where `shift` is below 0); the mask is that of where they come to lie.
    static Ints field(Ints v, int shift, int mask) {
        if (shift > 0) v = _mm512_srli_epi16(v, static_cast<unsigned>(shift));
        if (shift < 0) v = _mm512_slli_epi16(v, static_cast<unsigned>(-shift));
        return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<int8_t>(mask)));
    }
    static Ints merged(Ints a, Ints b) { return _mm512_or_si512(a, b); }
    static Ints lifted(Ints v, int mask, int bits) {  // some of each lane's bits, moved up
        return _mm512_sll_epi32(_mm512_and_si512(v, _mm512_set1_epi32(mask)), _mm_cvtsi32_si128(bits));
    }
    static Ints add_bytes(Ints a, Ints b) { return _mm512_add_epi8(a, b); }
    static Ints splat_bytes(int v) { return _mm512_set1_epi8(static_cast<int8_t>(v)); }

    // -- numbers of 16 blocks
    static Floats f32(const uint8_t* p) { return _mm512_loadu_ps(p); }
    static Floats f16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static Floats bf16(const uint8_t* p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static Floats e4m3(const uint8_t* p) {  // to half precision by shift, exact for subnormals too, then times 2^8
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i shifted = _mm256_slli_epi16(wide, 7);  // the sign is there twice
        const __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
        return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    }
    static Floats e8m0(const uint8_t* p) {  // 2^(byte - 127); byte 0 is the subnormal 2^-127
        const __m512i wide = u8_ints(p);
        const __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(wide, 23), _mm512_set1_epi32(0x00400000));
        return _mm512_castsi512_ps(bits);
    }
    static Ints u8_ints(const uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static Floats u8(const uint8_t* p) { return _mm512_cvtepi32_ps(u8_ints(p)); }
    static Floats i8(const uint8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static Floats nibble(const uint8_t* p, bool is_high) {
        const __m512i wide = u8_ints(p);
        return _mm512_cvtepi32_ps(is_high ? _mm512_srli_epi32(wide, 4) : _mm512_and_si512(wide, _mm512_set1_epi32(15)));
    }
    static Floats i32(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }

    static constexpr float kRaise = 1.0f;  // converting a byte in place is the fastest here

    // -- exact values of codes
    struct Codebook {
        static constexpr float unit = 1.0f;
        using Line = Ints;
        __m512 values;
        explicit Codebook(const float* table) : values(_mm512_loadu_ps(table)) {}
        static Line line(Ints codes) { return codes; }
        // Codes `nibble` (0 … 7) of each lane; the permutation looks at the lowest four bits alone.
        template <int Nibble> Floats at(Line line) const {
            return _mm512_permutexvar_ps(_mm512_srli_epi32(line, 4 * Nibble), values);
        }
    };
    using WholeBook = Codebook;  // one permutation looks sixteen values up: nothing is faster
    template <int Byte> static Floats signed_byte(Ints line) {
        if constexpr (Byte == 3) return _mm512_cvtepi32_ps(_mm512_srai_epi32(line, 24));
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(line, 24 - 8 * Byte), 24));
    }

    // -- dot products of unsigned levels with int8 activations, four in-features of each row at once
    template <int Kind> struct Levels {
        __m512i table;
        explicit Levels(const uint8_t* level)
            : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(level)))) {}
        Ints low(Ints line) const {
            const __m512i codes = _mm512_and_si512(line, _mm512_set1_epi8(15));
            return Kind == kBytes ? codes : _mm512_shuffle_epi8(table, codes);
        }
        Ints high(Ints line) const { return low(_mm512_srli_epi16(line, 4)); }
    };
    static Ints byte_levels(Ints line) { return _mm512_xor_si512(line, _mm512_set1_epi8(-128)); }
    template <int Kind> struct Dot {
        static constexpr bool kIsPaired = false;
        __m512i sum;
        void begin(int32_t start) { sum = _mm512_set1_epi32(start); }
        void add(Ints levels, const int8_t* x) {
            int32_t four;
            __builtin_memcpy(&four, x, 4);
            sum = _mm512_dpbusd_epi32(sum, levels, _mm512_set1_epi32(four));
        }
        void half() {}
        Floats floats() { return _mm512_cvtepi32_ps(sum); }
    };
    // Both bytes of int16 activations. Lower ones are unsigned, for which levels stand in as signed numbers.
    static constexpr int kMostByteBits = 6;  // of short codes
    struct ByteDot {
        __m512i lower, upper;
        void begin(int32_t start) {
            lower = _mm512_set1_epi32(start);
            upper = _mm512_setzero_si512();
        }
        void add(Ints levels, const int8_t* low, const int8_t* high) {
            int32_t four, above;
            __builtin_memcpy(&four, low, 4), __builtin_memcpy(&above, high, 4);
            lower = _mm512_dpbusd_epi32(lower, _mm512_set1_epi32(four), levels);
            upper = _mm512_dpbusd_epi32(upper, levels, _mm512_set1_epi32(above));
        }
        void half() {}
        Floats floats() const { return _mm512_cvtepi32_ps(_mm512_add_epi32(lower, _mm512_slli_epi32(upper, 8))); }
    };
    static void arrange_bytes(int8_t* levels) {  // of in-features 0, 2, 4, 6, 1, 3, 5, 7 the lower bytes, then the upper ones
        const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15));
        const __m512i apart = _mm512_shuffle_epi8(_mm512_loadu_si512(levels), bytes);
        _mm512_storeu_si512(levels, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), apart));
    }
    template <int Kind, int Rows> using Dots = std::conditional_t<Kind == kBytes, ByteRow<ByteDot>, EachRow<Dot<Kind>, Rows>>;

    // -- dot products of levels with int16 activations, a pair of in-features of each row at once
    static constexpr int kPlainPairs = 0, kLevelPairs = 1, kWordPairs = 2;
    template <int Kind> struct Pairs {
        __m512i table;
        explicit Pairs(const q4_matrix& m) {
            alignas(64) int16_t words[32];  // twice, for the permutation looks at five bits of a code and the next one
            for (int i = 0; i < 32; ++i) words[i] = Kind == kWordPairs ? m.word[i % 16] : m.level[i % 16];
            table = _mm512_load_si512(words);
        }
        void pairs(Ints line, bool is_high, Ints& even, Ints& odd) const {
            if constexpr (Kind == kPlainPairs) {
                const __m512i mask = _mm512_set1_epi32(0x000f000f);
                const __m512i first = is_high ? _mm512_srli_epi32(line, 4) : line;
                even = _mm512_and_si512(first, mask), odd = _mm512_and_si512(_mm512_srli_epi32(first, 8), mask);
            } else {
                const __m512i first = is_high ? _mm512_srli_epi16(line, 4) : line;
                even = _mm512_permutexvar_epi16(first, table);
                odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(first, 8), table);
            }
        }
    };
    static void byte_pairs(Ints line, Ints& even, Ints& odd) {  // of unsigned bytes: their centre is 128
        code_pairs(byte_levels(line), even, odd);
    }
    static void code_pairs(Ints codes, Ints& even, Ints& odd) {
        even = _mm512_and_si512(codes, _mm512_set1_epi32(0x00ff00ff)), odd = _mm512_srli_epi16(codes, 8);
    }
    using Sums = Ints;
    static Sums sums(int32_t value) { return _mm512_set1_epi32(value); }
    static Sums dot_pair(Sums sum, Ints pair, const int8_t* x) {
        int32_t two;
        __builtin_memcpy(&two, x, 4);
        return _mm512_dpwssd_epi32(sum, pair, _mm512_set1_epi32(two));
    }
    static Floats floats(Sums sum) { return _mm512_cvtepi32_ps(sum); }
    static constexpr bool kHasSingle = false;  // one permutation looks words up
};

}  // namespace
}  // namespace q4
