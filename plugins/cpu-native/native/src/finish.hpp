// From a tile's sums to y: step, global scale, bias, and y's type. Compiled per ISA.
#pragma once

#include <cstring>

#include "codes.hpp"

namespace q4 {

// The global scale meets float64 here, so that what the other in-features give is rounded once.
template <class V> Q4_INLINE typename V::Floats add_outliers(const Finish& f, int lane, typename V::Floats value) {
    alignas(64) float whole[V::kLanes];
    V::store(whole, value);
    const double* outliers = f.outliers + lane;
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

template <class V> Q4_INLINE void finish_whole(const Finish& f, const uint8_t* bias, uint8_t* y, const float* sums) {
    using F = typename V::Floats;
    const int size = size_of(f.type);
    for (int lane = 0; lane < kTileRows; lane += V::kLanes) {
        F value = V::mul(V::load(sums + lane), V::splat(f.step));
        if (f.outliers) {
            value = add_outliers<V>(f, lane, value);
        } else if (f.global) {
            const F global = f.is_global_per_row ? V::load(f.global + lane) : V::splat(*f.global);
            value = f.divides ? V::div(value, global) : V::mul(value, global);
        }
        value = V::mul(value, V::splat(f.growth));
        if (bias) value = V::add(value, numbers<V>(f.type, bias + lane * size));
        uint8_t* to = y + lane * size;
        if (f.type == Q4_F32)
            V::store(reinterpret_cast<float*>(to), value);
        else if (f.type == Q4_F16)
            V::store_f16(to, value);
        else
            V::store_bf16(to, value);
    }
}

template <class V> void finish(const Finish& given, const float* sums) {
    const auto* bias = static_cast<const uint8_t*>(given.bias);
    auto* y = static_cast<uint8_t*>(given.y);
    if (given.count == kTileRows) return finish_whole<V>(given, bias, y, sums);
    // The last tile of a matrix may be a part of one: nothing beyond its rows is read or written.
    Finish f = given;
    alignas(64) float global[kTileRows] = {};
    alignas(64) uint8_t beside[kTileRows * 4] = {}, out[kTileRows * 4];
    const auto bytes = static_cast<size_t>(f.count * size_of(f.type));
    if (f.is_global_per_row) {
        std::memcpy(global, f.global, static_cast<size_t>(f.count) * 4);
        f.global = global;
    }
    if (bias) {
        std::memcpy(beside, bias, bytes);
        bias = beside;
    }
    finish_whole<V>(f, bias, out, sums);
    std::memcpy(y, out, bytes);
}

}  // namespace q4
