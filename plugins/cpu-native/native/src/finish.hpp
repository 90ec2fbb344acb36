// From a tile's sums to y: step, global scale, bias, and y's type. Compiled per ISA.
#pragma once

#include <cstring>

#include "codes.hpp"

namespace q4 {

// The global scale meets float64 here, so that what the other in-features give is rounded once.
template <class V> Q4_INLINE typename V::Floats add_outliers(const Finish& f, const double* outliers, int lane, typename V::Floats value) {
    alignas(64) float whole[V::kLanes];
    V::store(whole, value);
    if (!f.global) {
        for (int i = 0; i < V::kLanes; ++i) whole[i] = static_cast<float>(whole[i] + outliers[i]);
        return V::load(whole);
    }
    for (int i = 0; i < V::kLanes; ++i) {
        const double sum = whole[i] + outliers[i], global = f.global[f.is_global_per_row ? lane + i : 0];
        whole[i] = static_cast<float>(f.divides ? sum / global : sum * global);
    }
    return V::load(whole);
}

// place(r) is where row r of y lies.
template <class V, int Type, class PlaceOf>
Q4_INLINE void finish_whole(const Finish& f, const uint8_t* bias, const float* sums, int rows, const PlaceOf& place) {
    using F = typename V::Floats;
    constexpr int kSize = Type == Q4_F32 ? 4 : 2, kRowsAhead = 8;  // rows of y are far apart, and many share a set of the cache
    const F step = V::splat(f.step);
    for (int lane = 0; lane < kTileRows; lane += V::kLanes) {
        F global = V::zero(), more = V::zero();
        if (f.global) global = f.is_global_per_row ? V::load(f.global + lane) : V::splat(*f.global);
        if (bias) more = numbers<V>(Type, bias + lane * kSize);
        for (int r = 0; r < rows; ++r) {
            if (r + kRowsAhead < rows) __builtin_prefetch(place(r + kRowsAhead), 1);
            F value = V::mul(V::load(sums + r * kTileRows + lane), step);
            if (f.with_outliers >> r & 1)
                value = add_outliers<V>(f, f.outliers + r * kTileRows + lane, lane, value);
            else if (f.global)
                value = f.divides ? V::div(value, global) : V::mul(value, global);
            if (f.shrunk >> r & 1) value = V::mul(value, V::splat(f.growth));
            value = V::rounded(value);  // not fused with the bias
            if (bias) value = V::add(value, more);
            uint8_t* to = place(r) + lane * kSize;
            if constexpr (Type == Q4_F32)
                V::store(reinterpret_cast<float*>(to), value);
            else if constexpr (Type == Q4_F16)
                V::store_f16(to, value);
            else
                V::store_bf16(to, value);
        }
    }
}

template <class V, int Type> Q4_INLINE void finish_of_type(const Finish& given, const float* sums, int rows) {
    const auto* bias = static_cast<const uint8_t*>(given.bias);
    if (given.count == kTileRows)
        return finish_whole<V, Type>(given, bias, sums, rows, [&](int r) __attribute__((always_inline)) { return given.row(r); });
    // The last tile of a matrix may be a part of one: nothing beyond its rows is read or written.
    Finish f = given;
    alignas(64) float global[kTileRows] = {};
    alignas(64) uint8_t beside[kTileRows * 4] = {}, out[Finish::kMost][kTileRows * 4];
    const auto bytes = static_cast<size_t>(f.count * size_of(Type));
    if (f.is_global_per_row) {
        std::memcpy(global, f.global, static_cast<size_t>(f.count) * 4);
        f.global = global;
    }
    if (bias) {
        std::memcpy(beside, bias, bytes);
        bias = beside;
    }
    finish_whole<V, Type>(f, bias, sums, rows, [&](int r) __attribute__((always_inline)) { return out[r]; });
    for (int r = 0; r < rows; ++r) std::memcpy(f.row(r), out[r], bytes);
}

template <class V> void finish(const Finish& f, const float* sums, int rows) {
    if (f.type == Q4_F32) return finish_of_type<V, Q4_F32>(f, sums, rows);
    if (f.type == Q4_F16) return finish_of_type<V, Q4_F16>(f, sums, rows);
    finish_of_type<V, Q4_BF16>(f, sums, rows);
}

}  // namespace q4
