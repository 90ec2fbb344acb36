// w4a8: int8 activations, int32 dot products.
#pragma once

#include "codes.hpp"

namespace q4 {

// Levels of a chunk, decoded as they are read; a step is four in-features.
template <class V, int Kind, int Second, int ScaleType, int Bits> struct A8Codes : Numbers<V, Second, ScaleType> {
    const typename V::template Levels<Kind>& table;
    const uint8_t* codes;
    Q4_INLINE typename V::Ints levels(int step, int part) const {
        const int lane = part * V::kLanes * 4;
        if constexpr (is_short<Bits>()) return short_codes<V, Bits>(codes, step, part);
        if constexpr (Bits == 8) return V::byte_levels(V::line(codes + step * 64 + lane));
        const auto line = V::line(codes + step / 2 * 64 + lane);
        return step % 2 ? table.high(line) : table.low(line);
    }
};

// Scales and second numbers of a panel's chunk.
template <class V> struct PanelNumbers {
    const Panel& panel;
    int64_t chunk;
    int sets;
    Q4_INLINE typename V::Floats number(const float* from, int set, int part) const {
        return V::load(from + (chunk * sets + set) * kTileRows + part * V::kLanes);
    }
    Q4_INLINE typename V::Floats scale(int set, int part) const { return number(panel.scale, set, part); }
    Q4_INLINE typename V::Floats second(int set, int part) const { return number(panel.second, set, part); }
};

// Add one set's dot products of whole numbers to the sums: floats(r) is row r's.
template <class V, int Rows, int Second, class Source, class Dots>
Q4_INLINE void add_set(const Source& source, int set, int part, const float* scale, const float* side, const Dots& floats,
                       typename V::Floats (&sum)[Rows]) {
    using F = typename V::Floats;
    const F s = source.scale(set, part);
    F z = V::zero();
    if constexpr (Second != Q4_NONE) z = source.second(set, part);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        F whole = floats(r);
        const F beside = V::splat(side[2 * r + set]);
        // Whole numbers below 2^24 as long as the zero is one: nothing is rounded before the scale.
        if constexpr (Second == Q4_ZERO) whole = V::fnma(z, beside, whole);
        sum[r] = V::fma(s, V::mul(whole, V::splat(scale[r])), sum[r]);
        if constexpr (Second == Q4_OFFSET) sum[r] = V::fma(z, beside, sum[r]);
    }
}

// One chunk's share of the sums of one part of the lanes.
template <class V, int Rows, int Kind, int Second, bool Halves, class Source>
Q4_INLINE void a8_chunk(const Source& source, const Activations& x, int64_t chunk, int part,
                        typename V::Floats (&sum)[Rows]) {
    const int8_t* levels = x.levels + chunk * Rows * V::template Dots<Kind, Rows>::kRowBytes;
    const float* scale = x.scale + chunk * Rows;
    const int32_t* start = x.start + chunk * Rows * 2;
    const float* side = x.side + chunk * Rows * 2;
    typename V::template Dots<Kind, Rows> dots;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        if (Halves || half == 0) dots.begin(start + half);
#pragma GCC unroll 2
        for (int step = 4 * half; step < 4 * half + 4; step += 2)
            dots.add(source.levels(step, part), source.levels(step + 1, part), levels, step);
        if (!Halves && half == 0) {
            dots.half();
            continue;
        }
        add_set<V, Rows, Second>(source, Halves ? half : 0, part, scale, side,
                                 [&](int r) __attribute__((always_inline)) { return dots.floats(r); }, sum);
    }
}

template <class V, int Rows, int Kind, int Second, int ScaleType, int Bits, bool Halves>
void a8_direct(const Tile& t, const Activations& x, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    const typename V::template Levels<Kind> table(t.matrix.level);
    typename V::Floats sum[kParts][Rows];
    for (auto& part : sum)
        for (auto& row : part) row = V::zero();
    Stream<Bits> stream(t.at, t.data, 0);
    for (int64_t chunk = 0; chunk < t.at.chunks; ++chunk, stream.next()) {
        stream.prefetch();
        const A8Codes<V, Kind, Second, ScaleType, Bits> source{{t.matrix, t.at, stream.head, stream.super}, table, stream.codes};
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part)
            a8_chunk<V, Rows, Kind, Second, Halves>(source, x, chunk, part, sum[part]);
    }
    for (int part = 0; part < kParts; ++part)
        for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + part * V::kLanes, sum[part][r]);
}

// Write a chunk's scales and second numbers to a panel.
template <class V, int Second, bool Halves, class Source>
Q4_INLINE void decode_numbers(const Source& source, float* scale, float* second) {
    for (int set = 0; set < (Halves ? 2 : 1); ++set)
        for (int part = 0; part < kTileRows / V::kLanes; ++part) {
            const int lane = set * kTileRows + part * V::kLanes;
            V::store(scale + lane, source.scale(set, part));
            if (Second != Q4_NONE) V::store(second + lane, source.second(set, part));
        }
}

template <class V, int Kind, int Second, int Bits, bool Halves>
void a8_decode(const Tile& t, int64_t first, int64_t last, Panel& panel) {
    constexpr int kParts = kTileRows / V::kLanes, kSets = Halves ? 2 : 1;
    const typename V::template Levels<Kind> table(t.matrix.level);
    Stream<Bits> stream(t.at, t.data, first);
    uint8_t* to = panel.codes;
    float *scale = panel.scale, *second = panel.second;
    for (int64_t chunk = first; chunk < last; ++chunk, stream.next()) {
        stream.prefetch();
        const A8Codes<V, Kind, Second, kAnyType, Bits> source{{t.matrix, t.at, stream.head, stream.super}, table, stream.codes};
#pragma GCC unroll 8
        for (int step = 0; step < 8; ++step, to += 64)
            for (int part = 0; part < kParts; ++part) V::store(to + part * V::kLanes * 4, source.levels(step, part));
        decode_numbers<V, Second, Halves>(source, scale, second);
        scale += kSets * kTileRows, second += kSets * kTileRows;
    }
}

// Add a panel's products to y, by so many parts of the lanes at once that each broadcast of activations serves them all;
// multiply(chunk, turn, first) gives those of a part p with a row r as floats(p, r).
template <class V, int Rows, int Parts, int Turns, int Second, bool Halves, class Multiply>
Q4_INLINE void add_panel(const Panel& panel, const Activations& x, int64_t chunks, float* y, const Multiply& multiply) {
    for (int first = 0; first < kTileRows / V::kLanes; first += Parts) {
        typename V::Floats sum[Parts][Rows];
        for (int p = 0; p < Parts; ++p)
            for (int r = 0; r < Rows; ++r) sum[p][r] = V::load(y + r * kTileRows + (first + p) * V::kLanes);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const PanelNumbers<V> source{panel, chunk, Halves ? 2 : 1};
#pragma GCC unroll 2
            for (int turn = 0; turn < Turns; ++turn) {
                auto dots = multiply(chunk, turn, first);
#pragma GCC unroll 4
                for (int p = 0; p < Parts; ++p)
                    add_set<V, Rows, Second>(source, Halves ? turn : 0, first + p, x.scale + chunk * Rows, x.side + chunk * Rows * 2,
                                             [&](int r) __attribute__((always_inline)) { return dots.floats(p, r); }, sum[p]);
            }
        }
        for (int p = 0; p < Parts; ++p)
            for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + (first + p) * V::kLanes, sum[p][r]);
    }
}

template <class V, int Rows, int Kind> struct A8Dots {
    typename V::template Dots<Kind, Rows> part[V::kA8Parts];
    Q4_INLINE auto floats(int p, int r) { return part[p].floats(r); }
};

template <class V, int Rows, int Kind, int Second, bool Halves>
void a8_panel(const Panel& panel, const Activations& x, int64_t chunks, float* y) {
    constexpr int kParts = V::kA8Parts, kTurns = Halves ? 2 : 1, kSteps = 8 / kTurns;
    add_panel<V, Rows, kParts, kTurns, Second, Halves>(panel, x, chunks, y, [&](int64_t chunk, int turn, int first) __attribute__((always_inline)) {
        const uint8_t* codes = panel.codes + (chunk * 8 + turn * kSteps) * 64 + first * V::kLanes * 4;
        const int8_t* levels = x.levels + chunk * Rows * kChunk;
        A8Dots<V, Rows, Kind> dots;
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) dots.part[p].begin(x.start + chunk * Rows * 2 + turn);
#pragma GCC unroll 8
        for (int step = 0; step < kSteps; step += 2) {
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p) {
                if (step == 4) dots.part[p].half();
                const uint8_t* from = codes + step * 64 + p * V::kLanes * 4;
                dots.part[p].add(V::line(from), V::line(from + 64), levels, turn * kSteps + step);
            }
        }
        return dots;
    });
}

}  // namespace q4
