// Attention over blocks of keys: per query and block, the largest score, the sum of exp(score - largest) and the values mixed by
// these weights. Blocks are counted from a query's first key and joined in their order. A score is summed by the lanes of a vector,
// then by halves, whichever of two ways computes it: for few queries key by key; for many by tiles of keys that are transposed once,
// which needs no adding up of lanes. So a result depends on its query and its keys alone, to the bit.
//
// What bounds it: for few queries reading the cache, once for all queries of a head; for many the FMAs.
#pragma once

#include <type_traits>

#include "kernel.hpp"
#include "maps.hpp"

namespace q4 {

constexpr int kFromTransposed = 12;  // queries

// Rows of keys or values, as whole vectors: in the cache itself, or of float32, copied and filled up with zeros.
template <class V, int Type> struct Stretch {
    static constexpr int kType = Type;
    static constexpr int64_t kBytes = Type == Q4_F32 ? 4 : Type == Q4_F16 ? 2 : 1;
    using F = typename V::Floats;
    struct Row {
        const uint8_t *data, *scale;  // of int8
        [[gnu::always_inline]] F load(int64_t column) const {
            const F v = numbers<V>(Type, data + column * kBytes);
            if constexpr (Type != Q4_I8) return v;
            float factor;
            std::memcpy(&factor, scale, 4);
            return V::mul(v, V::splat(factor));
        }
    };
    const uint8_t* data;
    int64_t stride, columns;
    [[gnu::always_inline]] Row row(int64_t i) const { return {data + i * stride, data + i * stride + columns}; }
};

template <class V, int Type> Q4_INLINE void widen_rows(const Stretch<V, Type>& rows, int64_t count, float* to) {
    const int64_t columns = rows.columns, padded = Attention::padded(columns);
    for (int64_t i = 0; i < count; ++i, to += padded) {
        auto row = rows.row(i);
        uint8_t scale[4] = {};  // a copy, which what is written can't be taken for
        if (Type == Q4_I8) std::memcpy(scale, row.scale, 4), row.scale = scale;
        int64_t c = 0;
        for (; c + V::kLanes <= columns; c += V::kLanes) V::store(to + c, row.load(c));
        if (c < columns) {
            uint8_t rest[V::kLanes * 4] = {};
            std::memcpy(rest, row.data + c * rows.kBytes, static_cast<size_t>((columns - c) * rows.kBytes));
            row.data = rest;
            V::store(to + c, row.load(0));
        }
        std::memset(to + columns, 0, static_cast<size_t>(padded - columns) * 4);
    }
}

// use(rows) of a tile; where `has_float32`, of float32 whatever the cache holds.
template <class V, class Use>
Q4_INLINE void with_tile(const Cache& cache, int64_t columns, int64_t first, int64_t count, bool has_float32, float* scratch,
                         const Use& use) {
    const auto of = [&](auto type) __attribute__((always_inline)) {
        constexpr int kType = decltype(type)::value;
        const Stretch<V, kType> rows{cache.data + first * cache.stride, cache.stride, columns};
        if (columns % V::kLanes == 0 && (kType == Q4_F32 || !has_float32)) return use(rows);
        widen_rows(rows, count, scratch);
        const int64_t padded = Attention::padded(columns);
        use(Stretch<V, Q4_F32>{reinterpret_cast<const uint8_t*>(scratch), padded * 4, padded});
    };
    if (cache.type == Q4_F16) return of(std::integral_constant<int, Q4_F16>{});
    if (cache.type == Q4_I8) return of(std::integral_constant<int, Q4_I8>{});
    of(std::integral_constant<int, Q4_F32>{});
}

// Keys side by side: [columns][kTileKeys], of which the last ones are zeros where there are fewer keys.
template <class V> Q4_INLINE void transpose(const Stretch<V, Q4_F32>& keys, int64_t count, int64_t columns, float* to) {
    typedef float Four __attribute__((vector_size(16)));
    const auto load = [](const float* from) {
        Four v;
        std::memcpy(&v, from, 16);
        return v;
    };
    const float none[4] = {};  // no static one: kernels of all instruction sets would share it
    for (int64_t i = 0; i < kTileKeys; i += 4) {
        const float* from[4];
        int64_t step[4];
        for (int64_t j = 0; j < 4; ++j) {
            const bool is_key = i + j < count;
            from[j] = is_key ? reinterpret_cast<const float*>(keys.row(i + j).data) : none, step[j] = is_key;
        }
        for (int64_t c = 0; c < columns; c += 4) {
            Four r[4];
            for (int64_t j = 0; j < 4; ++j) r[j] = load(from[j] + step[j] * c);
            const Four a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
            const Four d = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7), e = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
            const Four out[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                                 __builtin_shufflevector(d, e, 0, 1, 4, 5), __builtin_shufflevector(d, e, 2, 3, 6, 7)};
            for (int64_t j = 0; j < 4; ++j) std::memcpy(to + (c + j) * kTileKeys + i, &out[j], 16);
        }
    }
}

// One query and the block of its keys that is its turn.
struct Turn {
    const float* query;  // whole vectors
    float *scores, *state;
    int64_t first, end;  // from the first key of all turns
};

// What the lanes of a vector hold of a score: the products of every kLanes-th in-feature, for some keys; added up by halves.
template <class V, int Count, int Width>
Q4_INLINE void halves(const Turn* turns, const float* keys, int64_t columns, int lane, typename V::Floats* out) {
    using F = typename V::Floats;
    if constexpr (Width == 1) {
        constexpr int kFolds = V::kLanes / 8 ? V::kLanes / 8 : 1;  // a vector of 16 is folded first
        F sum[kFolds][Count];
        for (int fold = 0; fold < kFolds; ++fold) {
            for (int n = 0; n < Count; ++n) sum[fold][n] = V::zero();
            for (int64_t c = lane + 8 * fold; c < columns; c += V::kLanes) {
                const F key = V::load(keys + c * kTileKeys);
                for (int n = 0; n < Count; ++n) sum[fold][n] = V::fma(V::splat(turns[n].query[c]), key, sum[fold][n]);
            }
        }
        for (int n = 0; n < Count; ++n) {
            out[n] = sum[0][n];
            if constexpr (kFolds == 2) out[n] = V::add(sum[0][n], sum[1][n]);
        }
    } else {
        F other[Count];
        halves<V, Count, Width / 2>(turns, keys, columns, lane, out);
        halves<V, Count, Width / 2>(turns, keys, columns, lane + Width / 2, other);
        for (int n = 0; n < Count; ++n) out[n] = V::add(out[n], other[n]);
    }
}

template <class V, int Count, int Columns> void score_columns(const Turn* turns, const float* keys, int64_t given, int64_t place) {
    constexpr int kWidth = V::kLanes < 8 ? V::kLanes : 8;
    const int64_t columns = Columns ? Columns : given;
    for (int64_t i = 0; i < kTileKeys; i += V::kLanes) {
        typename V::Floats out[Count];
        halves<V, Count, kWidth>(turns, keys + i, columns, 0, out);
        for (int n = 0; n < Count; ++n) V::store(turns[n].scores + place + i, out[n]);
    }
}

// Loops over the in-features of small heads are written out: they took twice as long.
template <class V, int Count> Q4_INLINE void score_tile(const Turn* turns, const float* keys, int64_t columns, int64_t place) {
    if (columns == 32) return score_columns<V, Count, 32>(turns, keys, columns, place);
    if (columns == 64) return score_columns<V, Count, 64>(turns, keys, columns, place);
    score_columns<V, Count, 0>(turns, keys, columns, place);
}

// Four keys at once, because adding a vector's lanes up takes longer than its products; a key is loaded once for all queries. Past
// the last key it is taken again.
template <class V, int Count, int Type>
Q4_INLINE void score(const Turn* turns, const Stretch<V, Type>& keys, int64_t count, int64_t columns, int64_t place) {
    using F = typename V::Floats;
    for (int64_t i = 0; i < count; i += 4) {
        typename Stretch<V, Type>::Row key[4];
        F sum[Count][4];
        for (int64_t j = 0; j < 4; ++j) {
            key[j] = keys.row(i + j < count ? i + j : count - 1);
            for (int n = 0; n < Count; ++n) sum[n][j] = V::zero();
        }
        for (int64_t c = 0; c < columns; c += V::kLanes) {
            F query[Count];
            for (int n = 0; n < Count; ++n) query[n] = V::load(turns[n].query + c);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const F k = key[j].load(c);
                for (int n = 0; n < Count; ++n) sum[n][j] = V::fma(query[n], k, sum[n][j]);
            }
        }
        for (int n = 0; n < Count; ++n) V::four_sums(sum[n][0], sum[n][1], sum[n][2], sum[n][3], turns[n].scores + place + i);
    }
}

// Add some vectors' width of weighted values, of keys from `first` up to `last` of a tile, to the sums of some queries.
template <class V, int Count, int Vectors, int Type>
Q4_INLINE void mix(const Turn* turns, const Stretch<V, Type>& values, int64_t column, int64_t place, int64_t first, int64_t last) {
    using F = typename V::Floats;
    if (first >= last) return;
    const float* weights[Count];
    F sum[Count][Vectors];
    for (int n = 0; n < Count; ++n) {
        weights[n] = turns[n].scores + place;
        for (int part = 0; part < Vectors; ++part) sum[n][part] = V::load(turns[n].state + Attention::kHead + column + part * V::kLanes);
    }
    auto value = values.row(first);
    value.data += column * values.kBytes;
    for (int64_t i = first; i < last; ++i, value.data += values.stride, value.scale += values.stride) {
        F weight[Count];
        for (int n = 0; n < Count; ++n) weight[n] = V::splat(weights[n][i]);
#pragma GCC unroll 4
        for (int part = 0; part < Vectors; ++part) {
            const F v = V::rounded(value.load(part * V::kLanes));  // into a register, once for all queries
            for (int n = 0; n < Count; ++n) sum[n][part] = V::fma(weight[n], v, sum[n][part]);
        }
    }
    for (int n = 0; n < Count; ++n)
        for (int part = 0; part < Vectors; ++part) V::store(turns[n].state + Attention::kHead + column + part * V::kLanes, sum[n][part]);
}

// The same of a tile's keys, in their order: those that all of the queries see at once, the others query by query. What a query
// does not see has no weight, not even 0: it may be NaN.
template <class V, int Count, int Vectors, int Type>
Q4_INLINE void mix_tile(const Turn* turns, const Stretch<V, Type>& values, int64_t column, int64_t place, int64_t count) {
    int64_t from[Count], to[Count], first = 0, last = count;
    for (int n = 0; n < Count; ++n) {
        from[n] = turns[n].first > place ? turns[n].first - place : 0;
        to[n] = turns[n].end - place < count ? turns[n].end - place : count;
        first = from[n] > first ? from[n] : first, last = to[n] < last ? to[n] : last;
    }
    if (Count == 1) return mix<V, Count, Vectors, Type>(turns, values, column, place, first, last);
    if (first >= last) first = last = count;  // none in common
    for (int n = 0; n < Count; ++n) mix<V, 1, Vectors, Type>(turns + n, values, column, place, from[n], first < to[n] ? first : to[n]);
    mix<V, Count, Vectors, Type>(turns, values, column, place, first, last);
    for (int n = 0; n < Count; ++n) mix<V, 1, Vectors, Type>(turns + n, values, column, place, last > from[n] ? last : from[n], to[n]);
}

// `some(n)` of queries from n on, Most at once as long as they last: as constants, so that sums stay in registers.
template <int Most, class Some> Q4_INLINE void by(int count, const Some& some, int n = 0) {
    for (; n + Most <= count; n += Most) some(n, std::integral_constant<int, Most>{});
    if constexpr (Most > 1) {
        if (n < count) by<Most - 1>(count, some, n);
    }
}

// A block whose scores are all -inf has no weight, whatever the others have.
Q4_INLINE float base_of(float most) { return most > -INFINITY ? most : 0.0f; }

// exp(scale · score - the largest of them) in the place of scores; and both numbers at the head of a state.
template <class V> Q4_INLINE void weigh(const Turn& t, float scale) {
    using F = typename V::Floats;
    float* scores = t.scores + t.first;
    const int64_t count = t.end - t.first;
    if (!(scale > 0.0f)) {
        map<V>(count, scores, [&](F v) { return V::mul(v, V::splat(scale)); }, scores);
        scale = 1.0f;
    }
    t.state[0] = scale * largest_of<V>(scores, count);  // rounding keeps the order
    t.state[1] = soften<V>(scores, scores, count, base_of(t.state[0]), [&](F v) { return V::rounded(V::mul(v, V::splat(scale))); });
}

template <class V> Q4_INLINE float exp_of(float x) {
    alignas(64) float lanes[V::kLanes];
    V::store(lanes, Math<V>::exp(V::splat(x)));
    return lanes[0];
}

// Join the state of a query's next block to that of those before.
template <class V> void join(const float* next, float* state, int64_t columns) {
    using F = typename V::Floats;
    const float most = next[0] > state[0] ? next[0] : state[0];
    const F old = V::splat(exp_of<V>(state[0] - base_of(most))), more = V::splat(exp_of<V>(next[0] - base_of(most)));
    state[0] = most;
    const int64_t padded = Attention::padded(columns);
    alignas(64) float sums[V::kLanes];
    V::store(sums, V::fma(V::splat(state[1]), old, V::rounded(V::mul(V::splat(next[1]), more))));
    state[1] = sums[0];
    map<V>(padded, state + Attention::kHead, [&](F a, F b) { return V::fma(a, old, V::rounded(V::mul(b, more))); },
           state + Attention::kHead, next + Attention::kHead);
}

template <class V> void conclude(const float* state, int64_t columns, float* out) {
    using F = typename V::Floats;
    map<V>(columns, out, [&](F v) { return V::div(v, V::splat(state[1])); }, state + Attention::kHead);
}

// One block of each query that has as many.
template <class V> void attend_block(const Attention& a, int64_t block, const float* const* queries) {
    constexpr bool kIsNarrow = V::kLanes == 8;  // 16 registers: more queries at once would spill
    constexpr int kKeyed = kIsNarrow ? 3 : 5, kScored = kIsNarrow ? 2 : 4, kMixed = kIsNarrow ? 3 : 6;
    const int64_t whole = ceil_div(a.columns, V::kLanes) * V::kLanes, size = Attention::state_size(a.columns);
    Turn turns[Attention::kMost];
    int count = 0;
    int64_t first = INT64_MAX, last = 0;
    for (int n = 0; n < a.count; ++n) {
        const Attention::One& one = a.each[n];
        const int64_t from = one.first + block * Attention::kBlock;
        if (from >= one.end) continue;
        const int64_t to = from + Attention::kBlock < one.end ? from + Attention::kBlock : one.end;
        float* scores = a.scratch.scores + count * Attention::kRoom;
        turns[count++] = {queries[n], scores, block == a.from ? one.state : a.scratch.states + n * size, from, to};
        first = from < first ? from : first, last = to > last ? to : last;
    }
    for (int n = 0; n < count; ++n) turns[n].first -= first, turns[n].end -= first;
    // Rows that are taken once are one tile. Widening them twice is faster than writing what is widened.
    const auto each_tile = [&](const Cache& cache, int at_once, const auto& use) __attribute__((always_inline)) {
        const bool has_float32 = count > 2 * at_once;
        const int64_t most = a.columns % V::kLanes == 0 && count <= at_once ? last - first : kTileKeys;
        for (int64_t i = first, keys; i < last; i += keys) {
            keys = last - i < most ? last - i : most;
            with_tile<V>(cache, a.columns, i, keys, has_float32, a.scratch.tile,
                         [&](const auto& tile) __attribute__((always_inline)) { use(tile, i - first, keys); });
        }
    };
    const bool is_transposed = count >= kFromTransposed;
    each_tile(a.keys, kKeyed, [&](const auto& tile, int64_t place, int64_t keys) __attribute__((always_inline)) {
        constexpr int kType = std::decay_t<decltype(tile)>::kType;
        if constexpr (kType == Q4_F32) {
            if (is_transposed) {
                float* columns = a.scratch.transposed;
                transpose<V>(tile, keys, whole, columns);
                return by<kScored>(count, [&](int n, auto some) { score_tile<V, some.value>(turns + n, columns, whole, place); });
            }
        }
        by<kKeyed>(count, [&](int n, auto some) { score<V, some.value, kType>(turns + n, tile, keys, whole, place); });
    });
    for (int n = 0; n < count; ++n) {
        weigh<V>(turns[n], a.scale);
        std::memset(turns[n].state + Attention::kHead, 0, static_cast<size_t>(Attention::padded(a.columns)) * 4);
    }
    each_tile(a.values, kMixed, [&](const auto& tile, int64_t place, int64_t keys) __attribute__((always_inline)) {
        constexpr int kType = std::decay_t<decltype(tile)>::kType;
        int64_t column = 0;
        for (; column + 4 * V::kLanes <= whole; column += 4 * V::kLanes)
            by<kMixed>(count, [&](int n, auto some) { mix_tile<V, some.value, 4, kType>(turns + n, tile, column, place, keys); });
        for (; column + 2 * V::kLanes <= whole; column += 2 * V::kLanes)
            by<6>(count, [&](int n, auto some) { mix_tile<V, some.value, 2, kType>(turns + n, tile, column, place, keys); });
        for (; column < whole; column += V::kLanes)
            by<6>(count, [&](int n, auto some) { mix_tile<V, some.value, 1, kType>(turns + n, tile, column, place, keys); });
    });
    for (int n = 0; n < a.count && block > a.from; ++n)
        if (a.each[n].first + block * Attention::kBlock < a.each[n].end) join<V>(a.scratch.states + n * size, a.each[n].state, a.columns);
}

// The states of some blocks of each query, joined; the first of them is one that every query has.
template <class V> void attend(const Attention& a) {
    const float* queries[Attention::kMost];
    for (int n = 0; n < a.count; ++n) {
        queries[n] = a.each[n].query;
        if (a.columns % V::kLanes == 0) continue;
        const int64_t padded = Attention::padded(a.columns);
        float* whole = a.scratch.queries + n * padded;
        std::memcpy(whole, queries[n], static_cast<size_t>(a.columns) * 4);
        std::memset(whole + a.columns, 0, static_cast<size_t>(padded - a.columns) * 4);
        queries[n] = whole;
    }
    for (int64_t block = a.from; block < a.to; ++block) attend_block<V>(a, block, queries);
}

}  // namespace q4
