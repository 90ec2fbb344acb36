// What programs compute besides products: norms, activations, attention, the largest numbers. Compiled per ISA. Each result is
// made of the same operations in the same order at any position, so that no number of threads changes a bit.
#pragma once

#include <cmath>
#include <cstring>

#include "neurons.hpp"
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

// exp(x - the largest x) to y: returns their sum.
template <class V> Q4_INLINE float soften(const float* x, float* y, int64_t count) {
    using F = typename V::Floats;
    F most = V::splat(-INFINITY);
    int64_t j = 0;
    for (; j + V::kLanes <= count; j += V::kLanes) most = Math<V>::most(V::load(x + j), most);
    alignas(64) float lanes[V::kLanes];
    V::store(lanes, most);
    float peak = -INFINITY;
    for (const float lane : lanes) peak = lane > peak ? lane : peak;
    for (; j < count; ++j) peak = x[j] > peak ? x[j] : peak;
    map<V>(count, y, [&](F v) { return Math<V>::exp(V::sub(v, V::splat(peak))); }, x);
    return gather<V>(count, [](F sum, F value) { return V::add(sum, value); }, y);
}

template <class V> void softmax(const float* x, float* y, int64_t count) {
    using F = typename V::Floats;
    const F sum = V::splat(soften<V>(x, y, count));
    map<V>(count, y, [&](F v) { return V::div(v, sum); }, y);
}

// The scores of some queries with keys from `first` up to `last`. Four keys at once, because adding a vector's lanes up takes
// longer than its products; three queries at once, because a key is loaded for all of them. Past the last key it is taken again.
template <class V, int Count> Q4_INLINE void score(const Queries& q, const Queries::One* each, int64_t first, int64_t last) {
    using F = typename V::Floats;
    for (int64_t i = first; i < last; i += 4) {
        const float* key[4];
        F sum[Count][4];
        for (int64_t j = 0; j < 4; ++j) {
            key[j] = q.keys + (i + j < last ? i + j : last - 1) * q.key_stride;
            for (int n = 0; n < Count; ++n) sum[n][j] = V::zero();
        }
        int64_t c = 0;
        for (; c + V::kLanes <= q.columns; c += V::kLanes) {
            F query[Count];
            for (int n = 0; n < Count; ++n) query[n] = V::load(each[n].query + c);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const F k = V::load(key[j] + c);
                for (int n = 0; n < Count; ++n) sum[n][j] = V::fma(query[n], k, sum[n][j]);
            }
        }
        if (c < q.columns) {
            for (int n = 0; n < Count; ++n) {
                const F query = partial<V>(each[n].query + c, q.columns - c);
                for (int j = 0; j < 4; ++j) sum[n][j] = V::fma(query, partial<V>(key[j] + c, q.columns - c), sum[n][j]);
            }
        }
        for (int n = 0; n < Count; ++n) {
            float four[4];
            V::four_sums(sum[n][0], sum[n][1], sum[n][2], sum[n][3], four);
            for (int64_t j = 0; j < 4; ++j)
                if (i + j < last && i + j >= each[n].first && i + j < each[n].end) each[n].scores[i + j - each[n].first] = q.scale * four[j];
        }
    }
}

// Add some vectors' width of weighted values, of keys from `first` up to `last`, to the sums of some queries.
template <class V, int Count, int Vectors>
Q4_INLINE void mix(const Queries& q, const Queries::One* each, int64_t column, int64_t first, int64_t last,
                   typename V::Floats (*out)[Vectors]) {
    using F = typename V::Floats;
    if (first >= last) return;
    const float *value = q.values + column + first * q.value_stride, *weights[Count];
    F sum[Count][Vectors];
    for (int n = 0; n < Count; ++n) {
        weights[n] = each[n].scores + (first - each[n].first);
        for (int part = 0; part < Vectors; ++part) sum[n][part] = out[n][part];
    }
    for (int64_t i = 0; i < last - first; ++i, value += q.value_stride) {
        F weight[Count];
        for (int n = 0; n < Count; ++n) weight[n] = V::splat(weights[n][i]);
#pragma GCC unroll 4
        for (int part = 0; part < Vectors; ++part) {
            const F v = V::load(value + part * V::kLanes);
            for (int n = 0; n < Count; ++n) sum[n][part] = V::fma(weight[n], v, sum[n][part]);
        }
    }
    for (int n = 0; n < Count; ++n)
        for (int part = 0; part < Vectors; ++part) out[n][part] = sum[n][part];
}

// The same of all keys, in their order: those that all of the queries see at once, the others query by query.
template <class V, int Count, int Vectors>
Q4_INLINE void mix_all(const Queries& q, const Queries::One* each, const float* totals, int64_t column) {
    typename V::Floats out[Count][Vectors];
    int64_t first = each[0].first, last = each[0].end;
    for (int n = 0; n < Count; ++n) {
        for (auto& part : out[n]) part = V::zero();
        first = each[n].first > first ? each[n].first : first;
        last = each[n].end < last ? each[n].end : last;
    }
    if (Count == 1) {
        mix<V, Count, Vectors>(q, each, column, first, last, out);
    } else {
        if (first > last) first = last;
        for (int n = 0; n < Count; ++n) mix<V, 1, Vectors>(q, each + n, column, each[n].first, first < each[n].end ? first : each[n].end, out + n);
        mix<V, Count, Vectors>(q, each, column, first, last, out);
        for (int n = 0; n < Count; ++n) mix<V, 1, Vectors>(q, each + n, column, last > each[n].first ? last : each[n].first, each[n].end, out + n);
    }
    for (int n = 0; n < Count; ++n)
        for (int part = 0; part < Vectors; ++part)
            V::store(each[n].out + column + part * V::kLanes, V::div(out[n][part], V::splat(totals[n])));
}

// `all(first, last)` of queries, three at once as long as they last: as constants, so that sums stay in registers.
template <class Three, class Two, class One> Q4_INLINE void by_threes(int count, const Three& three, const Two& two, const One& one) {
    int n = 0;
    for (; n + 3 <= count; n += 3) three(n);
    if (count - n == 2) two(n);
    if (count - n == 1) one(n);
}

template <class V> void attend(const Queries& q) {
    constexpr int64_t kTile = 32;  // keys, which stay near for all queries
    int64_t first = q.each[0].first, last = q.each[0].end;
    for (int n = 1; n < q.count; ++n) {
        first = q.each[n].first < first ? q.each[n].first : first;
        last = q.each[n].end > last ? q.each[n].end : last;
    }
    for (int64_t i = first; i < last; i += kTile) {
        const int64_t end = i + kTile < last ? i + kTile : last;
        by_threes(q.count, [&](int n) { score<V, 3>(q, q.each + n, i, end); }, [&](int n) { score<V, 2>(q, q.each + n, i, end); },
                  [&](int n) { score<V, 1>(q, q.each + n, i, end); });
    }
    float totals[Queries::kMost];
    for (int n = 0; n < q.count; ++n) totals[n] = soften<V>(q.each[n].scores, q.each[n].scores, q.each[n].end - q.each[n].first);
    int64_t column = 0;
    for (; column + 4 * V::kLanes <= q.columns; column += 4 * V::kLanes)
        by_threes(q.count, [&](int n) { mix_all<V, 3, 4>(q, q.each + n, totals + n, column); },
                  [&](int n) { mix_all<V, 2, 4>(q, q.each + n, totals + n, column); },
                  [&](int n) { mix_all<V, 1, 4>(q, q.each + n, totals + n, column); });
    for (; column + V::kLanes <= q.columns; column += V::kLanes)
        for (int n = 0; n < q.count; ++n) mix_all<V, 1, 1>(q, q.each + n, totals + n, column);
    for (; column < q.columns; ++column)
        for (int n = 0; n < q.count; ++n) {
            const Queries::One& each = q.each[n];
            float one = 0.0f;
            for (int64_t i = each.first; i < each.end; ++i) one += each.scores[i - each.first] * q.values[i * q.value_stride + column];
            each.out[column] = one / totals[n];
        }
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

template <class V>
constexpr Operations operations_of{dot<V>,     rms_norm<V>, layer_norm<V>, activate<V>, combine<V>,
                                   affine<V>,  softmax<V>,  attend<V>,     largest<V>,
                                   integrate<V>, fire<V>,   send};

}  // namespace q4
