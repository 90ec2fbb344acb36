// Stored numbers by their definitions alone: nothing here is shared with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "q4_cpu.h"

namespace q4test {

inline int width(int32_t type) {
    return type == Q4_F32 || type == Q4_I32 ? 4 : type == Q4_BF16 || type == Q4_F16 ? 2 : 1;
}

struct FloatKind {
    int exponent_bits, fraction_bits;
    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
constexpr FloatKind kSingle{8, 23}, kBrain{8, 7}, kHalf{5, 10}, kEight{4, 3};

inline FloatKind kind_of(int32_t type) {
    return type == Q4_F32 ? kSingle : type == Q4_BF16 ? kBrain : type == Q4_F16 ? kHalf : kEight;
}

inline double decode_float(uint32_t bits, FloatKind kind, bool has_infinity) {
    const uint32_t fraction = bits & ((1u << kind.fraction_bits) - 1);
    const uint32_t top = (1u << kind.exponent_bits) - 1, exponent = bits >> kind.fraction_bits & top;
    const double sign = bits >> (kind.exponent_bits + kind.fraction_bits) & 1 ? -1.0 : 1.0;
    if (exponent == top && has_infinity)
        return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - kind.bias() - kind.fraction_bits);
    const double whole = fraction + static_cast<double>(1u << kind.fraction_bits);
    return sign * std::ldexp(whole, static_cast<int>(exponent) - kind.bias() - kind.fraction_bits);
}

inline double decode(int32_t type, const void* from) {
    uint32_t bits = 0;
    std::memcpy(&bits, from, static_cast<size_t>(width(type)));  // little-endian, as every machine here is
    switch (type) {
    case Q4_F32:
    case Q4_BF16:
    case Q4_F16: return decode_float(bits, kind_of(type), true);
    case Q4_E4M3: return decode_float(bits, kEight, false);
    case Q4_E8M0: return std::ldexp(1.0, static_cast<int>(bits) - 127);
    case Q4_LOW_U4:  // in a source, bytes below 16
    case Q4_HIGH_U4:
    case Q4_U8: return bits;
    case Q4_I8: return static_cast<int8_t>(bits);
    default: return static_cast<int32_t>(bits);
    }
}

// The nearest number of a float type, ties to even; beyond the largest, an infinity.
inline double round_to(int32_t type, double value) {
    if (value == 0.0 || !std::isfinite(value)) return value;
    const FloatKind kind = kind_of(type);
    const int exponent = std::max(std::ilogb(value), 1 - kind.bias());
    const int unit = exponent - kind.fraction_bits;
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
    if (std::fabs(rounded) >= std::ldexp(1.0, kind.bias() + 1))
        return std::copysign(std::numeric_limits<double>::infinity(), value);
    return rounded;
}

// Write a value that the float type holds.
inline void encode(int32_t type, double value, void* to) {
    float single = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    if (type == Q4_BF16) bits = std::isnan(value) ? 0x7fc0 : bits >> 16;
    if (type == Q4_F16) {
        const double size = std::fabs(value);
        uint32_t rest;
        if (std::isnan(value))
            rest = 0x7e00;
        else if (std::isinf(value))
            rest = 0x7c00;
        else if (size < 0x1p-14)
            rest = static_cast<uint32_t>(std::ldexp(size, 24));
        else
            rest = static_cast<uint32_t>(std::ilogb(size) + 14) * 1024 +
                   static_cast<uint32_t>(std::ldexp(size, 10 - std::ilogb(size)));
        bits = (std::signbit(value) ? 0x8000u : 0u) | rest;
    }
    std::memcpy(to, &bits, static_cast<size_t>(width(type)));
}

}  // namespace q4test
