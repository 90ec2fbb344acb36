// Outliers: numbers of x next to which the others of their 32 in-features would be rounded away, for they share a scale.
//
// They are multiplied exactly, y[r] = sum of w[r, k] * x[k] over the outliers, and the others get a scale of their own. A
// column of 16 rows costs up to four fifths of what a chunk of 32 in-features does on AVX2, a third on AVX-512. Sums are of
// float64: a product of float32 is nearly exact there, and what the other in-features give is rounded once, with the result.
// Of many rows most outliers meet the same columns, which are decoded once (Columns): an outlier then takes a fifth of that.
#pragma once

#include "exact.hpp"

namespace q4 {

// At most 3 of 16 numbers that are not 0 reach a sixteenth of the largest (docs/decisions/0031-outliers-in-int16.md).
constexpr int kLarge = 3, kOf = 16;
static_assert(kMostLarge == kLarge * kChunk / kOf);

template <class V> int32_t magnitude(const float* x, int j) {
    using Bits [[gnu::may_alias]] = int32_t;
    return reinterpret_cast<const Bits*>(x)[j] & 0x7fffffff;
}

// The outliers, as bits. Without the largest ones, others may be outliers among the rest.
template <class V> uint32_t find_outliers(const float* x) {
    uint32_t found = 0;
    for (;;) {
        int32_t most = 0;
        for (int j = 0; j < kChunk; ++j)
            if (!(found >> j & 1)) most = std::max(most, magnitude<V>(x, j));
        uint32_t large = 0;
        int present = 0;
        for (int j = 0; j < kChunk; ++j) {
            if (found >> j & 1) continue;
            present += magnitude<V>(x, j) > 0;
            large |= uint32_t{magnitude<V>(x, j) >= most - kSixteenth} << j;
        }
        if (kOf * __builtin_popcount(large) > kLarge * present) return found;
        found |= large;
    }
}

// Not inlined: two copies might round differently.
template <class V, int Second, int Bits>
[[gnu::noinline]] void decode_column(const Tile& t, const Place& place, double* w) {
    const typename V::Codebook book(t.matrix.codebook);
    const double base = Bits != 4 ? byte_base(t.matrix) : 0.0;
    const auto bytes = V::splat_bytes(short_base(t.matrix));
    alignas(64) float value[kTileRows], scale[kTileRows], second[kTileRows];
    const Numbers<V, Second, kAnyType> of{t.matrix, t.at, t.data + place.head, t.data + place.super};
    for (int part = 0; part < kTileRows / V::kLanes; ++part) {
        const int lane = part * V::kLanes;
        V::store(value + lane, column_values<V, Bits>(t.data + place.codes, place, part, book, bytes));
        V::store(scale + lane, of.scale(place.set, part));
        V::store(second + lane, of.second(place.set, part));
    }
    for (int r = 0; r < kTileRows; ++r) {
        w[r] = value[r] + base;
        if constexpr (Second == Q4_ZERO) w[r] -= second[r];
        w[r] *= scale[r];
        if constexpr (Second == Q4_OFFSET) w[r] += second[r];
    }
}

template <class V, int Second, int Bits> void decode_columns(const Tile& t, Columns& columns) {
    for (int32_t i = 0; i < columns.count; ++i) decode_column<V, Second, Bits>(t, columns.which[i], columns.weights[i]);
}

template <class V, int Second, int Bits>
void multiply_outliers(const Tile& t, const Outlier* outliers, int64_t count, const Columns* columns, double* y) {
    constexpr int kBytes = sizeof(typename V::Floats), kParts = kTileRows * sizeof(double) / kBytes;
    typedef double Doubles __attribute__((vector_size(kBytes), may_alias));
    alignas(64) double alone[kTileRows];
    Doubles sum[kParts] = {};
    for (const Outlier* outlier = outliers; outlier < outliers + count; ++outlier) {
        const double* w = columns ? columns->find(outlier->column) : nullptr;
        if (!w) {
            decode_column<V, Second, Bits>(t, *outlier, alone);
            w = alone;
        }
        const double x = outlier->value;
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part) sum[part] += reinterpret_cast<const Doubles*>(w)[part] * x;
    }
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part) reinterpret_cast<Doubles*>(y)[part] = sum[part];
}

}  // namespace q4
