// A function of each number of a row, and sums over one, by whole vectors.
#pragma once

#include <cmath>
#include <cstring>

#include "vector_math.hpp"

namespace q4 {

// The first `count` numbers of a vector, filled up with zeros.
template <class V> Q4_INLINE typename V::Floats partial(const float* from, int64_t count) {
    alignas(64) float padded[V::kLanes] = {};
    std::memcpy(padded, from, static_cast<size_t>(count) * 4);
    return V::load(padded);
}

// y[j] = make(in[j] …), by whole vectors of which the last is filled up.
template <class V, class Make, class... In> Q4_INLINE void map(int64_t count, float* y, const Make& make, const In*... in) {
    int64_t j = 0;
    for (; j + V::kLanes <= count; j += V::kLanes) V::store(y + j, make(V::load(in + j)...));
    if (j == count) return;
    alignas(64) float out[V::kLanes];
    V::store(out, make(partial<V>(in + j, count - j)...));
    std::memcpy(y + j, out, static_cast<size_t>(count - j) * 4);
}

// The sum of add(sum, in[j] …), in four chains of vectors; a vector that is filled up adds zeros.
template <class V, class Add, class... In> Q4_INLINE float gather(int64_t count, const Add& add, const In*... in) {
    typename V::Floats sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t j = 0;
    for (; j + 4 * V::kLanes <= count; j += 4 * V::kLanes) {
#pragma GCC unroll 4
        for (int chain = 0; chain < 4; ++chain) sum[chain] = add(sum[chain], V::load(in + j + chain * V::kLanes)...);
    }
    for (; j + V::kLanes <= count; j += V::kLanes) sum[0] = add(sum[0], V::load(in + j)...);
    if (j < count) sum[1] = add(sum[1], partial<V>(in + j, count - j)...);
    return V::sum(V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3])));
}

template <class V> Q4_INLINE float largest_of(const float* x, int64_t count) {  // NaN is none
    typename V::Floats most = V::splat(-INFINITY);
    int64_t j = 0;
    for (; j + V::kLanes <= count; j += V::kLanes) most = Math<V>::most(V::load(x + j), most);
    alignas(64) float lanes[V::kLanes];
    V::store(lanes, most);
    float peak = -INFINITY;
    for (const float lane : lanes) peak = lane > peak ? lane : peak;
    for (; j < count; ++j) peak = x[j] > peak ? x[j] : peak;
    return peak;
}

// exp(x - peak) to y: returns their sum.
template <class V> Q4_INLINE float soften(const float* x, float* y, int64_t count, float peak) {
    using F = typename V::Floats;
    map<V>(count, y, [&](F v) { return Math<V>::exp(V::sub(v, V::splat(peak))); }, x);
    return gather<V>(count, [](F sum, F value) { return V::add(sum, value); }, y);
}

}  // namespace q4
