// What programs compute besides products: norms, activations, the largest numbers. Compiled per ISA. Each result is
// made of the same operations in the same order at any position, so that no number of threads changes a bit.
#pragma once

#include "attention.hpp"
#include "neurons.hpp"

namespace q4 {

template <class V> float dot(const float* a, const float* b, int64_t count) {
    using F = typename V::Floats;
    return gather<V>(count, [](F sum, F x, F y) { return V::fma(x, y, sum); }, a, b);
}

template <class V>
void rms_norm(const float* x, const float* weight, float eps, float shift, int64_t count, int64_t from, int64_t to, float* y) {
    using F = typename V::Floats;
    const float mean = dot<V>(x, x, count) / static_cast<float>(count);
    const F factor = V::splat(1.0f / std::sqrt(mean + eps)), more = V::splat(shift);
    map<V>(to - from, y + from, [&](F value, F w) { return V::mul(V::mul(value, factor), V::add(w, more)); }, x + from,
           weight + from);
}

template <class V>
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t count, int64_t from, int64_t to,
                float* y) {
    using F = typename V::Floats;
    const float length = static_cast<float>(count);
    const float mean = gather<V>(count, [](F sum, F value) { return V::add(sum, value); }, x) / length;
    const F middle = V::splat(mean);
    const int64_t whole = count - count % V::kLanes;  // zeros that fill a vector up would count as far away
    float squares = gather<V>(whole, [&](F sum, F value) {
        const F away = V::sub(value, middle);
        return V::fma(away, away, sum);
    }, x);
    for (int64_t j = whole; j < count; ++j) squares += (x[j] - mean) * (x[j] - mean);
    const F factor = V::splat(1.0f / std::sqrt(squares / length + eps));
    map<V>(to - from, y + from, [&](F value, F w, F b) { return V::fma(V::mul(V::sub(value, middle), factor), w, b); }, x + from,
           weight + from, bias + from);
}

template <class V> void activate(int32_t op, const float* x, float* y, int64_t count) {
    using F = typename V::Floats;
    using M = Math<V>;
    switch (op) {
    case Q4_RELU: return map<V>(count, y, [](F v) { return v < V::zero() ? V::zero() : v; }, x);
    case Q4_GELU: return map<V>(count, y, [](F v) { return M::gelu(v); }, x);
    case Q4_GELU_TANH: return map<V>(count, y, [](F v) { return M::gelu_tanh(v); }, x);
    case Q4_SILU: return map<V>(count, y, [](F v) { return V::mul(v, M::sigmoid(v)); }, x);
    case Q4_SIGMOID: return map<V>(count, y, [](F v) { return M::sigmoid(v); }, x);
    default: return map<V>(count, y, [](F v) { return M::tanh(v); }, x);
    }
}

template <class V> void combine(bool is_sum, const float* a, const float* b, float* y, int64_t count) {
    using F = typename V::Floats;
    if (is_sum) return map<V>(count, y, [](F p, F q) { return V::add(p, q); }, a, b);
    map<V>(count, y, [](F p, F q) { return V::mul(p, q); }, a, b);
}

// In two turns: one would be a fused operation, which rounds once.
template <class V> void affine(const float* x, float factor, float addend, float* y, int64_t count) {
    using F = typename V::Floats;
    map<V>(count, y, [&](F v) { return V::mul(v, V::splat(factor)); }, x);
    map<V>(count, y, [&](F v) { return V::add(v, V::splat(addend)); }, y);
}

template <class V> void softmax(const float* x, float* y, int64_t count) {
    using F = typename V::Floats;
    const F sum = V::splat(soften<V>(x, y, count, largest_of<V>(x, count), [](F v) { return v; }));
    map<V>(count, y, [&](F v) { return V::div(v, sum); }, y);
}

// Whole numbers in the order of the floats, both zeros alike and NaN above all.
template <class V> Q4_INLINE int32_t order_of(float x) {
    x += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    const int32_t ordered = bits ^ (bits >> 31 & 0x7fffffff);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : ordered;
}

template <class V> void largest(const float* x, int64_t count, int64_t k, float* values, int64_t* columns) {
    constexpr int64_t kStretch = 64;  // whose largest is asked for first
    float alone;
    if (!values) values = &alone;
    int64_t held = 0;
    int32_t least = 0;  // of those held, once there are k
    for (int64_t first = 0; first < count; first += kStretch) {
        const int64_t last = first + kStretch < count ? first + kStretch : count;
        if (held == k && last - first == kStretch) {
            int32_t most = INT32_MIN;
            for (int64_t j = 0; j < kStretch; ++j) {
                const int32_t order = order_of<V>(x[first + j]);
                most = order > most ? order : most;
            }
            if (most <= least) continue;
        }
        for (int64_t j = first; j < last; ++j) {
            const int32_t order = order_of<V>(x[j]);
            if (held == k && order <= least) continue;
            int64_t place = held < k ? held++ : k - 1;
            for (; place > 0 && order_of<V>(values[place - 1]) < order; --place)
                values[place] = values[place - 1], columns[place] = columns[place - 1];
            values[place] = x[j], columns[place] = j;
            least = order_of<V>(values[held - 1]);
        }
    }
}

// Of int8 the scale is the largest magnitude / 127. Where that is not finite, so is the whole row, as levels are 0.
template <class V> void keep(const float* x, int64_t count, int32_t type, uint8_t* row) {
    if (type == Q4_F32) {
        std::memcpy(row, x, static_cast<size_t>(count) * 4);
        return;
    }
    if (type == Q4_F16) {
        int64_t c = 0;
        for (; c + V::kLanes <= count; c += V::kLanes) V::store_f16(row + 2 * c, V::load(x + c));
        uint8_t rest[2 * V::kLanes];
        if (c == count) return;
        V::store_f16(rest, V::partial(x + c, count - c));
        std::memcpy(row + 2 * c, rest, static_cast<size_t>(count - c) * 2);
        return;
    }
    int32_t most = 0;
    for (int64_t c = 0; c < count; ++c) {
        int32_t bits;
        std::memcpy(&bits, x + c, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float amax;
    std::memcpy(&amax, &most, 4);
    const float scale = amax / 127.0f, large = 127.0f / amax, inverse = large < 3.40282347e38f ? large : 3.40282347e38f;
    std::memcpy(row + count, &scale, 4);
    if (most >= 0x7f800000) std::memset(row, 0, static_cast<size_t>(count));
    for (int64_t c = 0; c < count && most < 0x7f800000; ++c) row[c] = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyintf(x[c] * inverse)));
}

template <class V>
constexpr Operations operations_of{dot<V>,     rms_norm<V>, layer_norm<V>, activate<V>, combine<V>,
                                   affine<V>,  softmax<V>,  attend<V>,     join<V>,     conclude<V>,
                                   largest<V>, integrate<V>, fire<V>,      keep<V>,     send};

}  // namespace q4
