// 4 rows at once: NEON with dot products, and with the matrix products of I8MM where there is more than one row of x.
#pragma once

#include <arm_neon.h>

#include <type_traits>

#include "codes.hpp"

namespace q4 {
namespace {  // two instruction sets build on this file: neither's copy of a function may stand in for the other's

struct NeonDotprod {
    static constexpr int kLanes = 4;
    static constexpr int kDirectRows = 8;  // 32 registers: 8 dot products, tables; sums wait in L1
    static constexpr int kExactPanelRows = 6, kA8PanelRows = 8;
    static constexpr int64_t kExactPanelFrom = 12, kA8PanelFrom = 16;  // by count of operations: not measured yet
    static constexpr int kKinds = 1, kNarrow = 0, kWide = 0;
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
    static Floats load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Floats v) { vst1q_f32(to, v); }
    static void store(uint8_t* to, Ints v) { vst1q_u8(to, v); }
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
    static Ints line(const uint8_t* p) { return vld1q_u8(p); }

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
    static Floats i32(const uint8_t* p) { return vcvtq_f32_s32(vreinterpretq_s32_u8(vld1q_u8(p))); }

    // -- exact values of codes
    struct Codebook {
        static constexpr float unit = 1.0f;
        uint8x16x4_t bytes;  // of the 16 values
        explicit Codebook(const float* table) {
            for (int i = 0; i < 4; ++i) bytes.val[i] = vreinterpretq_u8_f32(vld1q_f32(table + 4 * i));
        }
        struct Line {
            uint8x16_t low, high;  // four times the codes
        };
        static Line line(Ints codes) {
            return {vandq_u8(vshlq_n_u8(codes, 2), vdupq_n_u8(60)), vandq_u8(vshrq_n_u8(codes, 2), vdupq_n_u8(60))};
        }
        // Four times the code, in each byte of its lane, plus 0 … 3 are the places of the value's four bytes.
        template <int Nibble> Floats at(const Line& line) const {
            constexpr uint8_t b = Nibble / 2;
            static constexpr uint8_t kSpread[16] = {b,     b,     b,     b,     b + 4,  b + 4,  b + 4,  b + 4,
                                                    b + 8, b + 8, b + 8, b + 8, b + 12, b + 12, b + 12, b + 12};
            const uint8x16_t first = vqtbl1q_u8(Nibble % 2 ? line.high : line.low, vld1q_u8(kSpread));
            const uint8x16_t places = vorrq_u8(first, vreinterpretq_u8_u32(vdupq_n_u32(0x03020100)));
            return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, places));
        }
    };
    // Codebooks of small whole numbers (times a power of two) are converted instead of looked up, as on AVX2.
    struct WholeBook {
        uint8x16_t levels;
        float unit;
        explicit WholeBook(const float* table) : unit(whole_unit(table)) {
            uint8_t bytes[16];
            for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(static_cast<int8_t>(table[i] / unit));
            levels = vld1q_u8(bytes);
        }
        using Line = Codebook::Line;
        Line line(Ints codes) const {
            return {vqtbl1q_u8(levels, vandq_u8(codes, vdupq_n_u8(15))), vqtbl1q_u8(levels, vshrq_n_u8(codes, 4))};
        }
        template <int Nibble> Floats at(const Line& line) const {
            return signed_byte<Nibble / 2>(Nibble % 2 ? line.high : line.low);
        }
    };
    template <int Byte> static Floats signed_byte(Ints line) {
        return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u8(line), 24 - 8 * Byte), 24));
    }

    // -- dot products of signed levels with int8 activations
    template <int Kind> struct Levels {
        uint8x16_t table;
        explicit Levels(const uint8_t* level) : table(vld1q_u8(level)) {
            if (vmaxvq_u8(table) > kNarrowLevel) table = veorq_u8(table, vdupq_n_u8(128));  // a wide table's centre
        }
        Ints low(Ints line) const { return vqtbl1q_u8(table, vandq_u8(line, vdupq_n_u8(15))); }
        Ints high(Ints line) const { return vqtbl1q_u8(table, vshrq_n_u8(line, 4)); }
    };
    static Ints byte_levels(Ints line) { return line; }
    template <int Kind, int Rows> struct Dots {
        int32x4_t sum[Rows];

        Q4_INLINE void begin(const int32_t* start) {
            for (int r = 0; r < Rows; ++r) sum[r] = vdupq_n_s32(start[2 * r]);
        }
        // Eight in-features of each row: the levels of the first four, and of the others.
        Q4_INLINE void add(Ints first, Ints others, const int8_t* x) {
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const int8x8_t eight = vld1_s8(x + r * kChunk);
                sum[r] = vdotq_lane_s32(sum[r], vreinterpretq_s8_u8(first), eight, 0);
                sum[r] = vdotq_lane_s32(sum[r], vreinterpretq_s8_u8(others), eight, 1);
            }
        }
        Q4_INLINE void half() {}
        Q4_INLINE Floats floats(int row) const { return vcvtq_f32_s32(sum[row]); }
    };
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
struct NeonI8mm : NeonDotprod {
    // smmla multiplies 2 rows by 2 rows of x over 8 in-features: twice the products of sdot.
    template <int Rows> struct Pairs {
        static_assert(Rows % 2 == 0);
        int32x4_t sum[Rows / 2][2];  // of 2 rows of x with rows 0 and 1, and with rows 2 and 3 of the vector

        Q4_INLINE void begin(const int32_t* start) {
            for (int p = 0; p < Rows / 2; ++p) {
                const int32x2_t both = vset_lane_s32(start[4 * p + 2], vdup_n_s32(start[4 * p]), 1);
                sum[p][0] = sum[p][1] = vcombine_s32(both, both);
            }
        }
        Q4_INLINE void add(Ints first, Ints others, const int8_t* x) {
            const int32x4_t a = vreinterpretq_s32_u8(first), b = vreinterpretq_s32_u8(others);
            const int8x16_t upper = vreinterpretq_s8_s32(vzip1q_s32(a, b));
            const int8x16_t lower = vreinterpretq_s8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 16
            for (int p = 0; p < Rows / 2; ++p) {
                const int8_t* pair = x + 2 * p * kChunk;
                const int8x16_t both = vcombine_s8(vld1_s8(pair), vld1_s8(pair + kChunk));
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
    template <int Kind, int Rows> using Dots = std::conditional_t<Rows == 1, NeonDotprod::Dots<Kind, 1>, Pairs<Rows>>;
};
#endif

}  // namespace
}  // namespace q4
