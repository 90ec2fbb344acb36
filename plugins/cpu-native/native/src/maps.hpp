// A function of each number of a row, and sums over one, by whole vectors.
#pragma once

#include <cmath>
#include <cstring>

#include "vector_math.hpp"

namespace q4 {

// y[j] = make(in[j] …), by whole vectors of which the last is filled up.
template <class V, class Make, class... In> Q4_INLINE void map(int64_t count, float* y, const Make& make, const In*... in) {
    int64_t j = 0;
    for (; j + V::kLanes <= count; j += V::kLanes) V::store(y + j, make(V::load(in + j)...));
    if (j < count) V::store_partial(y + j, make(V::partial(in + j, count - j)...), count - j);
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
    if (j < count) sum[1] = add(sum[1], V::partial(in + j, count - j)...);
    return V::sum(V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3])));
}

template <class V> Q4_INLINE float largest_of(const float* x, int64_t count) {  // NaN is none
    typename V::Floats most = V::splat(-INFINITY);
    int64_t j = 0;
    for (; j + V::kLanes <= count; j += V::kLanes) most = Math<V>::most(V::load(x + j), most);
    if (j < count && j) most = Math<V>::most(V::load(x + count - V::kLanes), most);  // some of them again
    float peak = V::largest(most);
    for (j = j ? count : 0; j < count; ++j) peak = x[j] > peak ? x[j] : peak;
    return peak;
}

// exp(make(x) - peak) to y: returns their sum.
template <class V, class Make> Q4_INLINE float soften(const float* x, float* y, int64_t count, float peak, const Make& make) {
    using F = typename V::Floats;
    const F top = V::splat(peak);
    F sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()};  // as gather adds up
    const auto step = [&](int64_t j, int chain) __attribute__((always_inline)) {
        const F value = Math<V>::exp(V::sub(make(V::load(x + j)), top));
        V::store(y + j, value);
        sum[chain] = V::add(sum[chain], value);
    };
    int64_t j = 0;
    for (; j + 4 * V::kLanes <= count; j += 4 * V::kLanes) {
#pragma GCC unroll 4
        for (int chain = 0; chain < 4; ++chain) step(j + chain * V::kLanes, chain);
    }
    for (; j + V::kLanes <= count; j += V::kLanes) step(j, 0);
    if (j < count) {
        const F value = V::first_of(Math<V>::exp(V::sub(make(V::partial(x + j, count - j)), top)), count - j);
        V::store_partial(y + j, value, count - j);
        sum[1] = V::add(sum[1], value);
    }
    return V::sum(V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3])));
}

}  // namespace q4
