// 4 rows at once: NEON with dot products, and with the matrix products of I8MM where there is more than one row of x.
#pragma once

#include <arm_neon.h>

#include <type_traits>

#include "codes.hpp"

namespace q4 {
namespace {  // two instruction sets build on this file: neither's copy of a function may stand in for the other's

struct NeonDotprod {
    static constexpr int kLanes = 4;
    // By llvm-mca's model of Neoverse N2, not measured yet: 8 rows of x would spill, and panels pay early.
    static constexpr int kDirectRows = 4;
    static constexpr int kExactPanelRows = 6, kA8PanelRows = 8, kA16PanelRows = 8;
    static constexpr int kA8Parts = 1, kA16Parts = 1;
    static constexpr int64_t kExactPanelFrom = 6, kA8PanelFrom = 8, kA16PanelFrom = 8;
    static constexpr int kKinds = 1, kNarrow = 0, kWide = 0, kShort = -1;
    static constexpr bool kIsWideSigned = true;  // sdot takes signed levels, and not every machine has usdot
    using Floats = float32x4_t;
    using Ints = uint8x16_t;

    static Floats zero() { return vdupq_n_f32(0.0f); }
    static Floats splat(float v) { return vdupq_n_f32(v); }
    static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats fnma(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }  // c - a b
    static Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
    static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats div(Floats a, Floats b) { return vdivq_f32(a, b); }
    static Floats rounded(Floats v) {
        asm("" : "+w"(v));
        return v;
    }
    static uint32_t ones(Floats v) {
        const int32x4_t place = {0, 1, 2, 3};
        return vaddvq_u32(vshlq_u32(vcvtq_u32_f32(v), place));
    }
    static float sum(Floats v) { return vaddvq_f32(v); }
    static void four_sums(Floats a, Floats b, Floats c, Floats d, float* to) {
        vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
    }
    static Floats load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Floats v) { vst1q_f32(to, v); }
    static void store(uint8_t* to, Ints v) { vst1q_u8(to, v); }
    // The first lanes of a vector, fewer than all, and 0 behind them; nothing else is read or written.
    static Floats partial(const float* from, int64_t count) {
        float lanes[kLanes] = {};
        __builtin_memcpy(lanes, from, static_cast<size_t>(count) * 4);
        return load(lanes);
    }
    static Floats most(Floats a, Floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }   // b where either is NaN
    static Floats least(Floats a, Floats b) { return vbslq_f32(vcltq_f32(a, b), a, b); }  // b where either is NaN
    static constexpr bool kHasPower = false;
    static Floats reciprocal(Floats v) { return div(splat(1.0f), v); }
    static Floats first_of(Floats v, int64_t count) {
        float lanes[kLanes];
        store(lanes, v);
        return partial(lanes, count);
    }
    static float largest(Floats v) { return vmaxvq_f32(v); }  // of no NaN
    static void store_partial(float* to, Floats v, int64_t count) {
        float lanes[kLanes];
        store(lanes, v);
        __builtin_memcpy(to, lanes, static_cast<size_t>(count) * 4);
    }
    static void store_f16(uint8_t* to, Floats v) {
        vst1_u8(to, vreinterpret_u8_f16(vcvt_f16_f32(v)));
    }
    static void store_bf16(uint8_t* to, Floats v) {  // round to nearest even; a NaN keeps its topmost bits and stays one
        const uint32x4_t bits = vreinterpretq_u32_f32(v);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        vst1_u8(to, vreinterpret_u8_u16(vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16)));
    }
    static int count_reaching(const float* x, int32_t least) {  // of 32 magnitudes, as bits
        uint32x4_t found = vdupq_n_u32(0);
        for (int i = 0; i < 8; ++i) {
            const int32x4_t magnitude = vandq_s32(vreinterpretq_s32_f32(vld1q_f32(x + 4 * i)), vdupq_n_s32(0x7fffffff));
            found = vsubq_u32(found, vcgeq_s32(magnitude, vdupq_n_s32(least)));
        }
        return static_cast<int>(vaddvq_u32(found));
    }
    static constexpr bool kHasRuns = false;
    static Ints line(const uint8_t* p) { return vld1q_u8(p); }
    static Ints shifted(Ints v, int bits) {
        return vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(v), vdupq_n_s32(-bits)));
    }
    // Bits of each byte, moved down (or up where `shift` is below 0); the mask is that of where they come to lie.
    static Ints field(Ints v, int shift, int mask) {
        return vandq_u8(vshlq_u8(v, vdupq_n_s8(static_cast<int8_t>(-shift))), vdupq_n_u8(static_cast<uint8_t>(mask)));
    }
    static Ints merged(Ints a, Ints b) { return vorrq_u8(a, b); }
    static Ints lifted(Ints v, int mask, int bits) {  // some of each lane's bits, moved up
        const uint32x4_t some = vandq_u32(vreinterpretq_u32_u8(v), vdupq_n_u32(static_cast<uint32_t>(mask)));
        return vreinterpretq_u8_u32(vshlq_u32(some, vdupq_n_s32(bits)));
    }
    static Ints add_bytes(Ints a, Ints b) { return vaddq_u8(a, b); }
    static Ints splat_bytes(int v) { return vdupq_n_u8(static_cast<uint8_t>(v)); }

    // -- numbers of 4 blocks
    static uint16x4_t four_bytes(const uint8_t* p) {
        uint32_t four;
        __builtin_memcpy(&four, p, 4);
        return vget_low_u16(vmovl_u8(vcreate_u8(four)));
    }
    static uint16x4_t four_halves(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
    static Floats f32(const uint8_t* p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
    static Floats f16(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(four_halves(p))); }
    static Floats bf16(const uint8_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(four_halves(p), 16)); }
    static Floats e4m3(const uint8_t* p) {  // to half precision by shift, exact for subnormals too, then times 2^8
        const uint16x4_t wide = four_bytes(p);
        const uint16x4_t sign = vshl_n_u16(vand_u16(wide, vdup_n_u16(0x80)), 8);
        const uint16x4_t rest = vshl_n_u16(vand_u16(wide, vdup_n_u16(0x7f)), 7);
        return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(sign, rest))), 256.0f);
    }
    static Floats e8m0(const uint8_t* p) {  // 2^(byte - 127); byte 0 is the subnormal 2^-127
        const uint32x4_t bits = vshlq_n_u32(vmovl_u16(four_bytes(p)), 23);
        return vreinterpretq_f32_u32(vmaxq_u32(bits, vdupq_n_u32(0x00400000)));
    }
    static Floats u8(const uint8_t* p) { return vcvtq_f32_u32(vmovl_u16(four_bytes(p))); }
    static Floats i8(const uint8_t* p) {
        uint32_t four;
        __builtin_memcpy(&four, p, 4);
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
    }
    static Floats nibble(const uint8_t* p, bool is_high) {
        const uint16x4_t wide = four_bytes(p);
        return vcvtq_f32_u32(vmovl_u16(is_high ? vshr_n_u16(wide, 4) : vand_u16(wide, vdup_n_u16(15))));
    }
    static Floats i32(const uint8_t* p) { return vcvtq_f32_s32(vreinterpretq_s32_u8(vld1q_u8(p))); }

    static constexpr float kRaise = 1.0f;  // converting a byte in place is the fastest here

    // -- exact values of codes: a table for each byte of a value that isn't 0 in all of them, and the bytes zipped together.
    // Before, in-features 0 of all rows are put side by side, then in-features 1 and so on.
    struct Line {
        Floats low[4], high[4];
    };
    static Ints by_feature(Ints codes) {
        static constexpr uint8_t kPlaces[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
        return vqtbl1q_u8(codes, vld1q_u8(kPlaces));
    }
    static Ints low_codes(Ints codes) { return vandq_u8(codes, vdupq_n_u8(15)); }
    static Ints high_codes(Ints codes) { return vshrq_n_u8(codes, 4); }
    // 16 values from the lower and upper halves of their bits, of 8 and 8.
    static void zip_halves(const uint16x8_t* lower, const uint16x8_t* upper, Floats* to) {
        for (int i = 0; i < 2; ++i) {
            to[2 * i] = vreinterpretq_f32_u16(vzip1q_u16(lower[i], upper[i]));
            to[2 * i + 1] = vreinterpretq_f32_u16(vzip2q_u16(lower[i], upper[i]));
        }
    }
    template <int Bytes> struct Book {  // whose values have but 0 beyond their topmost bytes
        using Line = NeonDotprod::Line;
        static constexpr float unit = 1.0f;
        uint8x16_t tables[Bytes];
        explicit Book(const float* table) {
            uint8_t bytes[Bytes][16];
            for (int i = 0; i < 16; ++i) {
                uint8_t value[4];
                __builtin_memcpy(value, table + i, 4);
                for (int b = 0; b < Bytes; ++b) bytes[b][i] = value[4 - Bytes + b];
            }
            for (int b = 0; b < Bytes; ++b) tables[b] = vld1q_u8(bytes[b]);
        }
        Q4_INLINE void look_up(Ints codes, Floats* to) const {
            uint8x16_t bytes[Bytes];
            for (int b = 0; b < Bytes; ++b) bytes[b] = vqtbl1q_u8(tables[b], codes);
            const auto pair = [&](int b, uint16x8_t(&both)[2]) {
                both[0] = vreinterpretq_u16_u8(vzip1q_u8(bytes[b], bytes[b + 1]));
                both[1] = vreinterpretq_u16_u8(vzip2q_u8(bytes[b], bytes[b + 1]));
            };
            uint16x8_t lower[2] = {vdupq_n_u16(0), vdupq_n_u16(0)}, upper[2];
            if constexpr (Bytes == 4) pair(0, lower);
            pair(Bytes - 2, upper);
            zip_halves(lower, upper, to);
        }
        Q4_INLINE Line line(Ints codes) const {
            Line out;
            const Ints ordered = by_feature(codes);
            look_up(low_codes(ordered), out.low);
            look_up(high_codes(ordered), out.high);
            return out;
        }
        template <int Nibble> Q4_INLINE Floats at(const Line& line) const {
            return Nibble % 2 ? line.high[Nibble / 2] : line.low[Nibble / 2];
        }
    };
    using Codebook = Book<4>;
    using WholeBook = Book<2>;  // whole numbers up to 127, and halves of them, have 7 bits after the first one
    template <int Byte> static Floats signed_byte(Ints line) {
        return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u8(line), 24 - 8 * Byte), 24));
    }

    // -- dot products of signed levels with int8 activations
    template <int Kind> struct Levels {
        uint8x16_t table;
        explicit Levels(const uint8_t* level) : table(vld1q_u8(level)) {
            if (vmaxvq_u8(table) > kNarrowLevel) table = veorq_u8(table, vdupq_n_u8(128));  // a wide table's centre
        }
        Ints low(Ints line) const { return vqtbl1q_u8(table, low_codes(line)); }
        Ints high(Ints line) const { return vqtbl1q_u8(table, high_codes(line)); }
    };
    static Ints byte_levels(Ints line) { return line; }
    template <int Kind, int Rows> struct Dots {
        static constexpr int kRowBytes = kChunk;
        int32x4_t sum[Rows];

        Q4_INLINE void begin(const int32_t* start) {
            for (int r = 0; r < Rows; ++r) sum[r] = vdupq_n_s32(start[2 * r]);
        }
        // Two steps of a chunk: the levels of its in-features 4 * step … + 3, and of the next four.
        Q4_INLINE void add(Ints first, Ints others, const int8_t* x, int step) {
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const int8x8_t eight = vld1_s8(x + r * kChunk + step * 4);
                sum[r] = vdotq_lane_s32(sum[r], vreinterpretq_s8_u8(first), eight, 0);
                sum[r] = vdotq_lane_s32(sum[r], vreinterpretq_s8_u8(others), eight, 1);
            }
        }
        Q4_INLINE void half() {}
        Q4_INLINE Floats floats(int row) const { return vcvtq_f32_s32(sum[row]); }
    };

    // -- dot products of levels with int16 activations, of two in-features of each row, one in either half of a vector
    static constexpr int kPlainPairs = 0, kLevelPairs = 0, kWordPairs = 1;
    static Ints by_pair(Ints codes) {  // in-features 0, 2, 1, 3 of all rows
        static constexpr uint8_t kPlaces[16] = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};
        return vqtbl1q_u8(codes, vld1q_u8(kPlaces));
    }
    template <int Kind> struct Pairs {
        uint8x16_t low, high;  // bytes of the table
        explicit Pairs(const q4_matrix& m) {
            uint8_t bytes[2][16];
            for (int i = 0; i < 16; ++i) {
                const int level = Kind == kWordPairs ? m.word[i] : m.level[i];
                bytes[0][i] = static_cast<uint8_t>(level), bytes[1][i] = static_cast<uint8_t>(level >> 8);
            }
            low = vld1q_u8(bytes[0]), high = vld1q_u8(bytes[1]);
        }
        Q4_INLINE void pairs(Ints line, bool is_high, Ints& even, Ints& odd) const {
            const Ints ordered = by_pair(line), codes = is_high ? high_codes(ordered) : low_codes(ordered);
            const Ints lower = vqtbl1q_u8(low, codes), upper = vqtbl1q_u8(high, codes);
            even = vzip1q_u8(lower, upper), odd = vzip2q_u8(lower, upper);
        }
    };
    static void byte_pairs(Ints line, Ints& even, Ints& odd) {  // of unsigned bytes: their centre is 128
        code_pairs(veorq_u8(line, vdupq_n_u8(128)), even, odd);
    }
    static void code_pairs(Ints codes, Ints& even, Ints& odd) {
        const Ints bytes = by_pair(codes), none = vdupq_n_u8(0);
        even = vzip1q_u8(bytes, none), odd = vzip2q_u8(bytes, none);
    }
    using Sums = int32x4_t;
    static Sums sums(int32_t value) { return vdupq_n_s32(value); }
    static Sums dot_pair(Sums sum, Ints pair, const int8_t* x) {
        int32_t two;
        __builtin_memcpy(&two, x, 4);
        const int16x4_t both = vreinterpret_s16_s32(vdup_n_s32(two));
        const int16x8_t levels = vreinterpretq_s16_u8(pair);
        return vmlal_high_lane_s16(vmlal_lane_s16(sum, vget_low_s16(levels), both, 0), levels, both, 1);
    }
    static Floats floats(Sums sum) { return vcvtq_f32_s32(sum); }
    static constexpr bool kHasSingle = false;
    static constexpr int kMostByteBits = 0;
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
struct NeonI8mm : NeonDotprod {
    // A chunk of two rows of x, so that eight in-features of one are next to those of the other.
    static void pair_rows(int8_t* levels, int rows) {
        for (int8_t* pair = levels; pair < levels + rows * kChunk; pair += 2 * kChunk) {
            const int8x16x2_t a = vld1q_s8_x2(pair), b = vld1q_s8_x2(pair + kChunk);
            for (int i = 0; i < 2; ++i) {
                vst1q_s8(pair + 32 * i, vcombine_s8(vget_low_s8(a.val[i]), vget_low_s8(b.val[i])));
                vst1q_s8(pair + 32 * i + 16, vcombine_s8(vget_high_s8(a.val[i]), vget_high_s8(b.val[i])));
            }
        }
    }
    // smmla multiplies 2 rows by 2 rows of x over 8 in-features: twice the products of sdot.
    template <int Rows> struct RowPairs {
        static constexpr int kRowBytes = kChunk;
        static_assert(Rows % 2 == 0);
        int32x4_t sum[Rows / 2][2];  // of 2 rows of x with rows 0 and 1, and with rows 2 and 3 of the vector

        Q4_INLINE void begin(const int32_t* start) {
            for (int p = 0; p < Rows / 2; ++p) {
                const int32x2_t both = vset_lane_s32(start[4 * p + 2], vdup_n_s32(start[4 * p]), 1);
                sum[p][0] = sum[p][1] = vcombine_s32(both, both);
            }
        }
        Q4_INLINE void add(Ints first, Ints others, const int8_t* x, int step) {
            const int32x4_t a = vreinterpretq_s32_u8(first), b = vreinterpretq_s32_u8(others);
            const int8x16_t upper = vreinterpretq_s8_s32(vzip1q_s32(a, b));
            const int8x16_t lower = vreinterpretq_s8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 16
            for (int p = 0; p < Rows / 2; ++p) {
                const int8x16_t both = vld1q_s8(x + 2 * p * kChunk + step * 8);
                sum[p][0] = vmmlaq_s32(sum[p][0], upper, both);
                sum[p][1] = vmmlaq_s32(sum[p][1], lower, both);
            }
        }
        Q4_INLINE void half() {}
        Q4_INLINE Floats floats(int row) const {  // [row 0 · x0, row 0 · x1, row 1 · x0, row 1 · x1] and so on
            const int32x4_t *two = sum[row / 2], even = vuzp1q_s32(two[0], two[1]), odd = vuzp2q_s32(two[0], two[1]);
            return vcvtq_f32_s32(row % 2 ? odd : even);
        }
    };
    template <int Kind, int Rows> using Dots = std::conditional_t<Rows == 1, NeonDotprod::Dots<Kind, 1>, RowPairs<Rows>>;
};
#endif

}  // namespace
}  // namespace q4
