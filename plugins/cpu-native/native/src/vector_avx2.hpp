// 8 rows at once: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "dots.hpp"

namespace q4 {
namespace {  // AVX-VNNI builds on this type: neither file's copy of a function may stand in for the other's

struct Avx2 {
    static constexpr int kLanes = 8;
    static constexpr int kDirectRows = 4;  // 16 registers: more rows of x would spill
    static constexpr int kExactPanelRows = 6, kA8PanelRows = 4, kA16PanelRows = 4;
    static constexpr int kA8Parts = 2, kA16Parts = 2;  // each broadcast of activations serves 16 rows
    static constexpr int64_t kExactPanelFrom = 6, kA8PanelFrom = 12, kA16PanelFrom = 6;
    static constexpr int kKinds = 2, kNarrow = 0, kWide = 1, kShort = 2, kBytes = 3;
    static constexpr bool kIsWideSigned = true;
    using Floats = __m256;
    using Ints = __m256i;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats splat(float v) { return _mm256_set1_ps(v); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
    static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    // A product that is not fused with what adds it.
    static Floats rounded(Floats v) {
        asm("" : "+x"(v));
        return v;
    }
    static uint32_t ones(Floats v) {  // lanes of 1 among lanes of 0, as bits
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GT_OQ)));
    }
    static float sum(Floats v) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    static void four_sums(Floats a, Floats b, Floats c, Floats d, float* to) {
        const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    }
    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Floats v) { _mm256_storeu_ps(to, v); }
    static void store(uint8_t* to, Ints v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
    // The first lanes of a vector, fewer than all, and 0 behind them; nothing else is read or written.
    static Floats partial(const float* from, int64_t count) { return _mm256_maskload_ps(from, first_lanes(count)); }
    static void store_partial(float* to, Floats v, int64_t count) { _mm256_maskstore_ps(to, first_lanes(count), v); }
    static Floats most(Floats a, Floats b) { return _mm256_max_ps(a, b); }    // b where either is NaN
    static Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }  // b where either is NaN
    static constexpr bool kHasPower = false;
    static Floats reciprocal(Floats v) { return div(splat(1.0f), v); }
    static Floats first_of(Floats v, int64_t count) { return _mm256_and_ps(v, _mm256_castsi256_ps(first_lanes(count))); }
    static float largest(Floats v) {  // of no NaN
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    static Ints first_lanes(int64_t count) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static void store_f16(uint8_t* to, Floats v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    static void store_bf16(uint8_t* to, Floats v) {  // round to nearest even; a NaN keeps its topmost bits and stays one
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
        const __m256i wide = _mm256_srli_epi32(
            _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
        const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(narrow));
    }
    static int count_reaching(const float* x, int32_t least) {  // of 32 magnitudes, as bits
        uint32_t found = 0;
        for (int i = 0; i < 4; ++i) {
            const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i));
            const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
            const __m256i reaches = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(least - 1));
            found |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(reaches))) << 8 * i;
        }
        return __builtin_popcount(found);
    }
    // 32 numbers to int8, and the sums of both halves' levels; false where some may be outliers, or integers can't hold them.
    static constexpr bool kHasRuns = true;
    Q4_INLINE static bool quantize_plain(const float* x, int8_t* levels, float* scale, int32_t* sums) {
        __m256 value[4];
        __m256i size[4], peak = _mm256_setzero_si256();
        for (int i = 0; i < 4; ++i) {
            value[i] = _mm256_loadu_ps(x + 8 * i);
            size[i] = _mm256_and_si256(_mm256_castps_si256(value[i]), _mm256_set1_epi32(0x7fffffff));
            peak = _mm256_max_epi32(peak, size[i]);
        }
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(peak), _mm256_extracti128_si256(peak, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        const int32_t most = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
        uint32_t large = 0;
        for (int i = 0; i < 4; ++i) {
            const __m256i reaches = _mm256_cmpgt_epi32(size[i], _mm256_set1_epi32(most - kSixteenth - 1));
            large |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(reaches))) << 8 * i;
        }
        float amax;
        __builtin_memcpy(&amax, &most, 4);
        *scale = amax / 127.0f;
        if (__builtin_popcount(large) <= kMostLarge || most > kHuge || !(*scale >= 1.1754944e-38f)) return false;
        const __m256 divisor = _mm256_set1_ps(*scale);
        __m256i whole[4];
        for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32(_mm256_div_ps(value[i], divisor));
        const __m256i words = _mm256_add_epi32(whole[0], whole[1]), others = _mm256_add_epi32(whole[2], whole[3]);
        const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(levels),
                            _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
        __m256i sum = _mm256_hadd_epi32(words, others);
        sum = _mm256_hadd_epi32(sum, sum);
        const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        sums[0] = _mm_cvtsi128_si32(both), sums[1] = _mm_extract_epi32(both, 1);
        return true;
    }
    static Ints line(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static Ints shifted(Ints v, int bits) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(bits)); }
    // Bits of each byte, moved down (or up where `shift` is below 0); the mask is that of where they come to lie.
    static Ints field(Ints v, int shift, int mask) {
        if (shift > 0) v = _mm256_srli_epi16(v, shift);
        if (shift < 0) v = _mm256_slli_epi16(v, -shift);
        return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<int8_t>(mask)));
    }
    static Ints merged(Ints a, Ints b) { return _mm256_or_si256(a, b); }
    static Ints lifted(Ints v, int mask, int bits) {  // some of each lane's bits, moved up
        return _mm256_sll_epi32(_mm256_and_si256(v, _mm256_set1_epi32(mask)), _mm_cvtsi32_si128(bits));
    }
    static Ints add_bytes(Ints a, Ints b) { return _mm256_add_epi8(a, b); }
    static Ints splat_bytes(int v) { return _mm256_set1_epi8(static_cast<int8_t>(v)); }
    static __m128i eight_bytes(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
    static __m128i eight_halves(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

    // -- numbers of 8 blocks
    static Floats f32(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
    static Floats f16(const uint8_t* p) { return _mm256_cvtph_ps(eight_halves(p)); }
    static Floats bf16(const uint8_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight_halves(p)), 16));
    }
    static Floats e4m3(const uint8_t* p) {  // as the topmost bits of 2^-120 times the value, exact for subnormals too
        const __m256i shifted = _mm256_slli_epi32(_mm256_cvtepi8_epi32(eight_bytes(p)), 20);  // the sign is there five times
        const __m256i bits = _mm256_and_si256(shifted, _mm256_set1_epi32(static_cast<int>(0x87f00000)));
        return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    }
    static Floats e8m0(const uint8_t* p) {  // 2^(byte - 127); byte 0 is the subnormal 2^-127
        const __m256i wide = _mm256_cvtepu8_epi32(eight_bytes(p));
        return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(wide, 23), _mm256_set1_epi32(0x00400000)));
    }
    static Floats u8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(p))); }
    static Floats i8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p))); }
    static Floats nibble(const uint8_t* p, bool is_high) {
        const __m256i wide = _mm256_cvtepu8_epi32(eight_bytes(p));
        return _mm256_cvtepi32_ps(is_high ? _mm256_srli_epi32(wide, 4) : _mm256_and_si256(wide, _mm256_set1_epi32(15)));
    }
    static Floats i32(const uint8_t* p) { return _mm256_cvtepi32_ps(line(p)); }

    // -- exact values of codes
    struct Codebook {
        static constexpr float unit = 1.0f;
        static constexpr bool kRaises = false;
        using Line = Ints;
        __m256 low, high;
        explicit Codebook(const float* table) : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
        static Line line(Ints codes) { return codes; }
        // Codes `nibble` (0 … 7) of each lane: a permutation looks at the lowest three bits, a blend at the topmost.
        template <int Nibble> Floats at(Line line) const {
            const __m256i code = _mm256_srli_epi32(line, 4 * Nibble);
            const __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(line, 28 - 4 * Nibble));
            return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), top);
        }
    };
    // Codebooks of small whole numbers (times a power of two) are converted instead of looked up: 3 operations for 8
    // weights in place of 6. `unit` is what a level stands for.
    struct WholeBook {
        static constexpr bool kRaises = true;
        struct Line {
            __m256i low, high;
        };
        __m256i levels;
        float unit;
        explicit WholeBook(const float* table) : unit(whole_unit(table)) {
            alignas(16) int8_t bytes[16];
            for (int i = 0; i < 16; ++i) bytes[i] = static_cast<int8_t>(table[i] / unit);
            levels = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
        }
        Line line(Ints codes) const {
            const __m256i mask = _mm256_set1_epi8(15);
            return {_mm256_shuffle_epi8(levels, _mm256_and_si256(codes, mask)),
                    _mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask))};
        }
        template <int Nibble> Floats at(const Line& line) const {
            return signed_byte<Nibble / 2>(Nibble % 2 ? line.high : line.low);
        }
        template <int Nibble> Floats raised_at(const Line& line) const {
            return raised_byte<Nibble / 2>(Nibble % 2 ? line.high : line.low);
        }
    };
    // A byte moved to the top of its lane by one shuffle, where two shifts would move it down again: 2^24 times its value.
    static constexpr float kRaise = 16777216.0f;
    template <int Byte> static Floats raised_byte(Ints line) {
        constexpr int kNone = static_cast<int>(0x80808080);
        const auto lane = [](int n) { return (4 * n + Byte) << 24 | (kNone & 0xffffff); };
        const __m256i order = _mm256_setr_epi32(lane(0), lane(1), lane(2), lane(3), lane(0), lane(1), lane(2), lane(3));
        return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(line, order));
    }
    template <int Byte> static Floats signed_byte(Ints line) {
        if constexpr (Byte == 3) return _mm256_cvtepi32_ps(_mm256_srai_epi32(line, 24));
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(line, 24 - 8 * Byte), 24));
    }

    // A sum that GCC leaves in its place: else it adds products to each other first, which then don't fit the registers,
    // and int16 panels take 1.3 times as long.
    static Ints in_order(Ints sum) {
        asm("" : "+x"(sum));
        return sum;
    }

    static Ints nibbles(Ints line, bool is_high) {
        return _mm256_and_si256(is_high ? _mm256_srli_epi16(line, 4) : line, _mm256_set1_epi8(15));
    }

    // -- dot products of levels with int8 activations, four in-features of each row at once
    template <int Kind> struct Levels {
        __m256i table;
        explicit Levels(const uint8_t* level) {
            __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(level));
            if (Kind == kWide) bytes = _mm_xor_si128(bytes, _mm_set1_epi8(-128));  // a wide table's centre is 128
            table = _mm256_broadcastsi128_si256(bytes);
        }
        Ints low(Ints line) const { return level(nibbles(line, false)); }
        Ints high(Ints line) const { return level(nibbles(line, true)); }
        Ints level(Ints codes) const { return Kind == kBytes ? codes : _mm256_shuffle_epi8(table, codes); }
    };
    static Ints byte_levels(Ints line) { return line; }
    // Narrow levels are unsigned and at most 24: four sums of two products stay below 2^15.
    // Wide ones are signed: their signs go to the activations, and two products of 128 * 127 stay below 2^15.
    // Short ones are unsigned and at most 63: two sums of two products stay below 2^15.
    template <int Kind> struct Dot {
        static constexpr bool kIsPaired = Kind == kShort;
        __m256i sum, sixteen;
        void begin(int32_t start) {
            sum = _mm256_set1_epi32(start);
            sixteen = _mm256_setzero_si256();
        }
        void add(Ints levels, const int8_t* x) {
            int32_t four;
            __builtin_memcpy(&four, x, 4);
            const __m256i wide_x = _mm256_set1_epi32(four);
            if constexpr (Kind == kNarrow) {
                sixteen = in_order(_mm256_add_epi16(sixteen, _mm256_maddubs_epi16(levels, wide_x)));
            } else {
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(wide_x, levels));
                sum = in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
            }
        }
        void add_two(Ints first, Ints others, const int8_t* x) {
            int32_t four, next;
            __builtin_memcpy(&four, x, 4), __builtin_memcpy(&next, x + 4, 4);
            const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(first, _mm256_set1_epi32(four)),
                                                   _mm256_maddubs_epi16(others, _mm256_set1_epi32(next)));
            sum = in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
        }
        // After at most four narrow additions.
        void half() {
            if constexpr (Kind == kNarrow) {
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(sixteen, _mm256_set1_epi16(1)));
                sixteen = _mm256_setzero_si256();
            }
        }
        Floats floats() {
            half();
            return _mm256_cvtepi32_ps(sum);
        }
    };
    // Both bytes of int16 activations. Lower ones are unsigned, for which levels stand in as signed numbers; levels are at most
    // 15, and four sums of two products of 15 * 255 stay below 2^15.
    static constexpr int kMostByteBits = 3;  // of short codes: with more, pairs are as fast
    struct ByteDot {
        __m256i sum, lower, upper;
        void begin(int32_t start) {
            sum = _mm256_set1_epi32(start);
            lower = upper = _mm256_setzero_si256();
        }
        void add(Ints levels, const int8_t* low, const int8_t* high) {
            int32_t four, above;
            __builtin_memcpy(&four, low, 4), __builtin_memcpy(&above, high, 4);
            lower = in_order(_mm256_add_epi16(lower, _mm256_maddubs_epi16(_mm256_set1_epi32(four), levels)));
            upper = in_order(_mm256_add_epi16(upper, _mm256_maddubs_epi16(levels, _mm256_set1_epi32(above))));
        }
        void half() {
            const __m256i low = _mm256_madd_epi16(lower, _mm256_set1_epi16(1));
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, _mm256_madd_epi16(upper, _mm256_set1_epi16(256))));
            lower = upper = _mm256_setzero_si256();
        }
        Floats floats() {
            half();
            return _mm256_cvtepi32_ps(sum);
        }
    };
    template <int Kind, int Rows> using Dots = std::conditional_t<Kind == kBytes, ByteRow<ByteDot>, EachRow<Dot<Kind>, Rows>>;

    // -- dot products of levels with int16 activations, a pair of in-features of each row at once
    static constexpr int kPlainPairs = 0, kLevelPairs = 1, kWordPairs = 2;
    template <int Kind> struct Pairs {
        __m256i low, high;  // bytes of the table
        explicit Pairs(const q4_matrix& m) {
            alignas(16) uint8_t bytes[2][16];
            for (int i = 0; i < 16; ++i) {
                const int level = Kind == kWordPairs ? m.word[i] : m.level[i];
                bytes[0][i] = static_cast<uint8_t>(level), bytes[1][i] = static_cast<uint8_t>(level >> 8);
            }
            low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[0])));
            high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[1])));
        }
        void pairs(Ints line, bool is_high, Ints& even, Ints& odd) const {
            if constexpr (Kind == kPlainPairs) {
                const __m256i mask = _mm256_set1_epi32(0x000f000f);
                const __m256i first = is_high ? _mm256_srli_epi32(line, 4) : line;
                even = _mm256_and_si256(first, mask), odd = _mm256_and_si256(_mm256_srli_epi32(first, 8), mask);
            } else {
                const __m256i codes = nibbles(line, is_high);
                const __m256i bytes = _mm256_shuffle_epi8(low, codes);
                split(bytes, even, odd);
                if constexpr (Kind == kWordPairs) {
                    const __m256i upper = _mm256_shuffle_epi8(high, codes);
                    const __m256i is_upper = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
                    even = _mm256_blendv_epi8(bytes, _mm256_slli_epi16(upper, 8), is_upper);
                    odd = _mm256_blendv_epi8(odd, upper, is_upper);
                }
            }
        }
    };
    static void split(Ints bytes, Ints& even, Ints& odd) {
        even = _mm256_and_si256(bytes, _mm256_set1_epi32(0x00ff00ff)), odd = _mm256_srli_epi16(bytes, 8);
    }
    static void byte_pairs(Ints line, Ints& even, Ints& odd) {  // of unsigned bytes: their centre is 128
        split(_mm256_xor_si256(line, _mm256_set1_epi8(-128)), even, odd);
    }
    static void code_pairs(Ints codes, Ints& even, Ints& odd) { split(codes, even, odd); }
    using Sums = Ints;
    static Sums sums(int32_t value) { return _mm256_set1_epi32(value); }
    static Ints two_levels(const int8_t* x) {
        int32_t two;
        __builtin_memcpy(&two, x, 4);
        return _mm256_set1_epi32(two);
    }
    static Sums dot_pair(Sums sum, Ints pair, const int8_t* x) {
        return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pair, two_levels(x))));
    }
    static Floats floats(Sums sum) { return _mm256_cvtepi32_ps(sum); }

    // -- the same of words with one row of x: half a chunk of each row, four in-features at once
    static constexpr bool kHasSingle = true;
    // Two interleavings put words together, and leave a row in two lanes: adding these puts the rows in order.
    struct SingleWords {
        Ints lower, upper;  // sums of rows 0, 1, 4, 5 and of 2, 3, 6, 7
        template <bool IsFirst> void add(const Pairs<kWordPairs>& table, Ints codes, const int8_t* levels) {
            int64_t four;
            __builtin_memcpy(&four, levels, 8);
            const __m256i x = _mm256_set1_epi64x(four);
            const __m256i low = _mm256_shuffle_epi8(table.low, codes), high = _mm256_shuffle_epi8(table.high, codes);
            const __m256i a = _mm256_madd_epi16(_mm256_unpacklo_epi8(low, high), x);
            const __m256i b = _mm256_madd_epi16(_mm256_unpackhi_epi8(low, high), x);
            lower = IsFirst ? a : in_order(_mm256_add_epi32(lower, a));
            upper = IsFirst ? b : in_order(_mm256_add_epi32(upper, b));
        }
        Sums sum() const { return _mm256_hadd_epi32(lower, upper); }
    };
    // For one row of x, in-features 0, 2, 4, 6, 1, 3, 5, 7 go in their own order: as words, or as lower and upper bytes.
    static void arrange_words(int8_t* levels) {
        const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        auto* bytes = reinterpret_cast<uint8_t*>(levels);
        for (int i = 0; i < 64; i += 32) store(bytes + i, _mm256_shuffle_epi8(line(bytes + i), order));
    }
    static void arrange_bytes(int8_t* levels) {
        const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15));
        auto* bytes = reinterpret_cast<uint8_t*>(levels);
        const __m256i a = _mm256_shuffle_epi8(line(bytes), order), b = _mm256_shuffle_epi8(line(bytes + 32), order);
        store(bytes, _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(a, b), 0xd8));
        store(bytes + 32, _mm256_permute4x64_epi64(_mm256_unpackhi_epi64(a, b), 0xd8));
    }
};

}  // namespace
}  // namespace q4
