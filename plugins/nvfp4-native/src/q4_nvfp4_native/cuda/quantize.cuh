// Rounds activations x[M, K] to E2M1 codes under block scales and one float32 scale a row.
//
//   codes [M, P / 2], scales [M, P / B], rows [M], P = K rounded up to a multiple of 128; what lies past K is zero.
//
// E4M3 (blocks of 16): rows[m] is a power of two, the smallest that lets 6 · 448 · rows[m] reach the row's largest
// magnitude, or the smallest one that is not below the checkpoint's static scale. A power of two costs no precision under
// a floating-point block scale, and makes values on the E2M1 grid exact. scale = amax / 6 / rows[m] as E4M3, to nearest,
// at least 2^-9 where the block is not zero, at most 448; code = nearest (ties to even) of x / rows[m] · (1 / scale).
// E8M0 (blocks of 32): scale = 2^ceil(log2(amax / 6)), rows[m] = 1.
// A row that holds NaN or an infinity gets rows[m] = NaN and zero codes, so that its results are NaN and no other row's.
//
// One block of threads a row; the second pass finds the row in L1 or L2. Bound: the bytes of x.
#pragma once

#include "gemm.cuh"

struct Q4Quantize {
    const void* x;
    uint8* codes;
    uint8* scales;
    float* rows;
    const float* static_scale;  // null: the row's own
    int64 row_step;             // elements from one row of x to the next
    int m;
    int k;
    int type;  // Q4Type of x
};

constexpr uint32 kInfinity = 0x7f800000u, kNan = 0x7fc00000u;

// The E2M1 code of a finite value: nearest magnitude, ties to the even code, at most 6; the sign is preserved.
Q4_DEVICE uint32 e2m1_code(float value) {
    const uint32 bits = bits_of(value);
    const float size = float_of(bits & 0x7fffffffu);
    const uint32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                        (size >= 3.5f) + (size > 5.0f);
    return code | (bits >> 31 << 3);
}

// The E4M3 byte nearest to a value of 0 … 448, ties to even.
Q4_DEVICE uint32 e4m3_byte(float value) {
    if (value < 0.015625f) {  // below 2^-6 the steps are 2^-9
        const float shifted = value * 512.0f + 8388608.0f;
        return bits_of(shifted) & 0xfu;
    }
    const uint32 bits = bits_of(value);
    return ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - 120u * 8u;
}

Q4_DEVICE float e4m3_value(uint32 byte) {
    if (byte < 8u) return static_cast<float>(byte) * 0.001953125f;
    return float_of(((byte >> 3) + 120u) << 23 | (byte & 7u) << 20);
}

// The power of two that a row is divided by: the smallest p with `largest` <= 2688 p, at least 2^-126.
Q4_DEVICE float row_scale(float largest) {
    const uint32 bits = bits_of(largest);
    const int exponent = static_cast<int>(bits >> 23) - 11 + ((bits & 0x7fffffu) > 0x280000u);  // 2688 = 1.3125 · 2^11
    return float_of(static_cast<uint32>(exponent < 1 ? 1 : exponent) << 23);
}

// The smallest power of two that is not below a positive scale, in 2^-126 … 2^126.
Q4_DEVICE float power_above(float scale) {
    const uint32 bits = bits_of(scale);
    const int exponent = static_cast<int>(bits >> 23) + ((bits & 0x7fffffu) != 0u);
    return float_of(static_cast<uint32>(exponent < 1 ? 1 : exponent > 253 ? 253 : exponent) << 23);
}

struct E4m3Rule {
    static constexpr int block = 16;
    // The scale byte of a block with that largest magnitude in a row divided by 1 / inverse; `factor` is what x is
    // multiplied with after `inverse`.
    static Q4_DEVICE uint32 byte(float largest, float inverse, float& factor) {
        factor = 0.0f;
        if (largest == 0.0f) return 0u;
        const float wanted = divide(largest, 6.0f) * inverse;
        const uint32 nearest = e4m3_byte(wanted < 448.0f ? wanted : 448.0f);
        const uint32 chosen = nearest == 0u ? 1u : nearest;
        factor = reciprocal(e4m3_value(chosen));
        return chosen;
    }
};

struct E8m0Rule {
    static constexpr int block = 32;
    static Q4_DEVICE uint32 byte(float largest, float, float& factor) {
        const uint32 bits = bits_of(divide(largest, 6.0f));
        const uint32 above = (bits >> 23) + ((bits & 0x7fffffu) != 0u);
        const uint32 chosen = above < 1u ? 1u : above;  // 2^-126: its reciprocal is a normal number
        factor = float_of((254u - chosen) << 23);
        return chosen;
    }
};

// Reads `count` elements from `index` on, zeros past `k`; in pieces of 16 bytes where the address allows.
template <int count>
Q4_DEVICE void load_block(float (&values)[count], const void* row, int index, int k, int type) {
    if (type == Q4_FLOAT32) {
        const float* from = static_cast<const float*>(row) + index;
        const bool is_whole = index + count <= k && (reinterpret_cast<unsigned long long>(from) & 15) == 0;
        if (is_whole) {
            Q4_UNROLL
            for (int i = 0; i < count; i += 4) {
                const float4 piece = *reinterpret_cast<const float4*>(from + i);
                values[i] = piece.x;
                values[i + 1] = piece.y;
                values[i + 2] = piece.z;
                values[i + 3] = piece.w;
            }
            return;
        }
    } else {
        const uint16* from = static_cast<const uint16*>(row) + index;
        const bool is_whole = index + count <= k && (reinterpret_cast<unsigned long long>(from) & 15) == 0;
        if (is_whole) {
            Q4_UNROLL
            for (int i = 0; i < count; i += 8) {
                const uint4 piece = *reinterpret_cast<const uint4*>(from + i);
                const uint32 words[4] = {piece.x, piece.y, piece.z, piece.w};
                Q4_UNROLL
                for (int j = 0; j < 8; ++j) {
                    const uint16 bits = static_cast<uint16>(words[j / 2] >> (16 * (j % 2)));
                    values[i + j] =
                        type == Q4_BFLOAT16 ? float_of(static_cast<uint32>(bits) << 16) : from_half(bits);
                }
            }
            return;
        }
    }
    Q4_UNROLL
    for (int i = 0; i < count; ++i) values[i] = index + i < k ? load_number(row, index + i, type) : 0.0f;
}

// The largest magnitude of a block as bits, which order like the magnitudes; NaN lies above infinity.
template <int count>
Q4_DEVICE uint32 largest_bits(const float (&values)[count]) {
    uint32 largest = 0u;
    Q4_UNROLL
    for (int i = 0; i < count; ++i) {
        const uint32 size = bits_of(values[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    return largest;
}

// The largest of every thread's number, for all threads; `shared` holds one number a warp.
Q4_DEVICE uint32 largest_in_block(uint32 value, uint32* shared) {
    Q4_UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const uint32 other = shuffle_xor(value, lanes);
        value = other > value ? other : value;
    }
    if (thread_index() % 32 == 0) shared[thread_index() / 32] = value;
    synchronize();
    for (int warp = 0; warp < block_threads() / 32; ++warp) value = shared[warp] > value ? shared[warp] : value;
    return value;
}

template <typename Rule>
Q4_DEVICE void quantize_row(const Q4Quantize& call) {
    constexpr int count = Rule::block;
    const int row = block_index();
    const int padded = (call.k + 127) / 128 * 128;
    const int size = call.type == Q4_FLOAT32 ? 4 : 2;
    const void* x = static_cast<const uint8*>(call.x) + row * call.row_step * size;
    float whole = 1.0f;
    if (count == 16 && call.static_scale != nullptr) whole = power_above(*call.static_scale);
    if (count == 16 && call.static_scale == nullptr) {
        uint32 largest = 0u;
        for (int index = thread_index() * count; index < call.k; index += block_threads() * count) {
            float values[count];
            load_block<count>(values, x, index, call.k, call.type);
            const uint32 bits = largest_bits<count>(values);
            largest = bits > largest ? bits : largest;
        }
        whole = row_scale(float_of(largest_in_block(largest, reinterpret_cast<uint32*>(shared_bytes()))));
        if (!(whole > 0.0f) || bits_of(whole) >= kInfinity) whole = 1.0f;  // such a row becomes NaN below
    }
    const float inverse = reciprocal(whole);
    bool is_bad = false;
    for (int index = thread_index() * count; index < padded; index += block_threads() * count) {
        float values[count];
        load_block<count>(values, x, index, call.k, call.type);
        const uint32 bits = largest_bits<count>(values);
        const bool is_finite = bits < kInfinity;
        is_bad = is_bad || !is_finite;
        float factor;
        const uint32 byte = Rule::byte(is_finite ? float_of(bits) : 0.0f, inverse, factor);
        uint32 words[count / 8];
        Q4_UNROLL
        for (int word = 0; word < count / 8; ++word) {
            uint32 packed = 0u;
            Q4_UNROLL
            for (int i = 0; i < 8; ++i)
                packed |= (is_finite ? e2m1_code(values[word * 8 + i] * inverse * factor) : 0u) << (4 * i);
            words[word] = packed;
        }
        const int64 place = (static_cast<int64>(row) * padded + index) / 2;
        uint32* codes = reinterpret_cast<uint32*>(call.codes + place);
        Q4_UNROLL
        for (int word = 0; word < count / 8; ++word) codes[word] = words[word];
        call.scales[(static_cast<int64>(row) * padded + index) / count] = static_cast<uint8>(byte);
    }
    is_bad = any_in_block(is_bad);
    if (thread_index() == 0) call.rows[row] = is_bad ? float_of(kNan) : whole;
}
