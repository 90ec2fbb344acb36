// w4i16: int16 activations, int32 dot products.
//
// Of eight in-features that stand in a line, levels 0 and 2, 4 and 6, 1 and 3, 5 and 7 of a row are pairs of 16 bits in the
// row's lane: masks give them where codes are their own levels, and a pair of activations is one broadcast. Activations
// have 16 bits of scale, amax / 32766, and tables of words beyond 4095 meet amax / 16383 (layout.hpp). Its error
// is in docs/decisions/0026-int16-activations.md.
//
// Sums of 32 in-features stay within 31 bits for levels up to 255, those of 16 for words up to 8191.
//
// One row of x meets codes that are their own levels in bytes: a8.hpp's kernel, with products of both bytes of an activation.
#pragma once

#include "a8.hpp"

namespace q4 {

// Whether one row of x meets bytes.
template <class V, int Kind, int Bits> constexpr bool has_byte_products() {
    if constexpr (V::kMostByteBits == 0) return false;
    return is_short<Bits>() ? Bits <= V::kMostByteBits : Bits == 4 && Kind == V::kPlainPairs;
}

// Pairs of levels of a chunk, decoded as they are read.
template <class V, int Kind, int Second, int ScaleType, int Bits> struct A16Codes : Numbers<V, Second, ScaleType> {
    const typename V::template Pairs<Kind>& table;
    const uint8_t* codes;
    // Of eight in-features, 0 and 2, 1 and 3, or 4 and 6, 5 and 7.
    Q4_INLINE void pairs(int eight, bool is_high, int part, typename V::Ints& even, typename V::Ints& odd) const {
        const int lane = part * V::kLanes * 4;
        if constexpr (is_short<Bits>())
            V::code_pairs(short_codes<V, Bits>(codes, eight * 2 + is_high, part), even, odd);
        else if constexpr (Bits == 8)
            V::byte_pairs(V::line(codes + eight * 128 + is_high * 64 + lane), even, odd);
        else
            table.pairs(V::line(codes + eight * 64 + lane), is_high, even, odd);
    }
};

// One row of x meets V::kA16Parts parts of the lanes at once, more rows one: codes are decoded once for all of them.
template <class V, int Rows, int Kind, int Second, int ScaleType, int Bits, bool Halves>
void a16_direct(const Tile& t, const Activations& x, float* y) {
    constexpr int kAll = kTileRows / V::kLanes, kParts = Rows == 1 ? V::kA16Parts : 1;
    constexpr bool kApart = Halves || Kind == V::kWordPairs;  // sums of words would overflow
    constexpr int kRowBytes = kChunk * 2;
    const typename V::template Pairs<Kind> table(t.matrix);
    typename V::Floats sum[kAll][Rows];
    for (auto& part : sum)
        for (auto& row : part) row = V::zero();
    Stream<Bits> stream(t.at, t.data, 0);
    for (int64_t chunk = 0; chunk < t.at.chunks; ++chunk, stream.next()) {
        stream.prefetch();
        const A16Codes<V, Kind, Second, ScaleType, Bits> source{{t.matrix, t.at, stream.head, stream.super}, table, stream.codes};
        const int64_t row = chunk * Rows;
#pragma GCC unroll 4
        for (int first = 0; first < kAll; first += kParts) {
            typename V::Sums dots[kParts][Rows];
#pragma GCC unroll 4
            for (int eight = 0; eight < 4; ++eight) {
                const int half = eight / 2;
#pragma GCC unroll 4
                for (int p = 0; p < kParts && (eight == 0 || (kApart && eight == 2)); ++p)
#pragma GCC unroll 16
                    for (int r = 0; r < Rows; ++r) dots[p][r] = V::sums(x.start[2 * (row + r) + half]);
#pragma GCC unroll 2
                for (int is_high = 0; is_high < 2; ++is_high) {
                    typename V::Ints pair[2][kParts];
#pragma GCC unroll 4
                    for (int p = 0; p < kParts; ++p) source.pairs(eight, is_high, first + p, pair[0][p], pair[1][p]);
#pragma GCC unroll 2
                    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 16
                        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
                            for (int p = 0; p < kParts; ++p)
                                dots[p][r] = V::dot_pair(dots[p][r], pair[i][p],
                                                         x.levels + (row + r) * kRowBytes + eight * 16 + is_high * 4 + i * 8);
                }
#pragma GCC unroll 4
                for (int p = 0; p < kParts && (eight == 3 || (kApart && eight == 1)); ++p)
                    add_set<V, Rows, Second>(source, Halves ? half : 0, first + p, x.scale + row, x.side + 2 * row,
                                             [&](int r) __attribute__((always_inline)) { return V::floats(dots[p][r]); },
                                             sum[first + p]);
            }
        }
    }
    for (int part = 0; part < kAll; ++part)
        for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + part * V::kLanes, sum[part][r]);
}

// One row of x, words: V::SingleWords sums half a chunk, which fits 31 bits.
template <class V, int ScaleType, bool Halves> void a16_single(const Tile& t, const Activations& x, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    const typename V::template Pairs<V::kWordPairs> table(t.matrix);
    typename V::Floats sum[kParts][1];
    for (auto& part : sum) part[0] = V::zero();
    Stream<4> stream(t.at, t.data, 0);
    for (int64_t chunk = 0; chunk < t.at.chunks; ++chunk, stream.next()) {
        stream.prefetch();
        const Numbers<V, Q4_NONE, ScaleType> source{t.matrix, t.at, stream.head, stream.super};
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            typename V::SingleWords dots[kParts];
#pragma GCC unroll 4
            for (int step = 4 * half; step < 4 * half + 4; ++step)
#pragma GCC unroll 4
                for (int p = 0; p < kParts; ++p) {
                    const auto codes = V::nibbles(V::line(stream.codes + step / 2 * 64 + p * V::kLanes * 4), step % 2);
                    const int8_t* levels = x.levels + chunk * kChunk * 2 + step * 8;
                    if (step % 4)
                        dots[p].template add<false>(table, codes, levels);
                    else
                        dots[p].template add<true>(table, codes, levels);
                }
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p)
                add_set<V, 1, Q4_NONE>(source, Halves ? half : 0, p, x.scale + chunk, x.side + 2 * chunk,
                                       [&](int) __attribute__((always_inline)) { return V::floats(dots[p].sum()); }, sum[p]);
        }
    }
    for (int p = 0; p < kParts; ++p) V::store(y + p * V::kLanes, sum[p][0]);
}

template <class V, int Kind, int Second, int Bits, bool Halves>
void a16_decode(const Tile& t, int64_t first, int64_t last, Panel& panel) {
    constexpr int kParts = kTileRows / V::kLanes, kSets = Halves ? 2 : 1;
    const typename V::template Pairs<Kind> table(t.matrix);
    Stream<Bits> stream(t.at, t.data, first);
    uint8_t* to = panel.codes;
    float *scale = panel.scale, *second = panel.second;
    for (int64_t chunk = first; chunk < last; ++chunk, stream.next()) {
        stream.prefetch();
        const A16Codes<V, Kind, Second, kAnyType, Bits> source{{t.matrix, t.at, stream.head, stream.super}, table, stream.codes};
#pragma GCC unroll 4
        for (int eight = 0; eight < 4; ++eight, to += 256)
            for (int part = 0; part < kParts; ++part)
#pragma GCC unroll 2
                for (int is_high = 0; is_high < 2; ++is_high) {
                    typename V::Ints even, odd;
                    source.pairs(eight, is_high, part, even, odd);
                    uint8_t* place = to + is_high * 64 + part * V::kLanes * 4;
                    V::store(place, even), V::store(place + 128, odd);
                }
        decode_numbers<V, Second, Halves>(source, scale, second);
        scale += kSets * kTileRows, second += kSets * kTileRows;
    }
}

template <class V, int Rows> struct A16Dots {
    typename V::Sums sum[V::kA16Parts][Rows];
    Q4_INLINE auto floats(int p, int r) const { return V::floats(sum[p][r]); }
};

template <class V, int Rows, int Kind, int Second, bool Halves>
void a16_panel(const Panel& panel, const Activations& x, int64_t chunks, float* y) {
    constexpr int kParts = V::kA16Parts, kRowBytes = kChunk * 2;
    constexpr int kTurns = Halves || Kind == V::kWordPairs ? 2 : 1;  // sums of words would overflow
    constexpr int kPairs = kChunk / 2 / kTurns;
    add_panel<V, Rows, kParts, kTurns, Second, Halves>(panel, x, chunks, y, [&](int64_t chunk, int turn, int first) __attribute__((always_inline)) {
        const uint8_t* codes = panel.codes + (chunk * kTurns + turn) * kPairs * 64 + first * V::kLanes * 4;
        const int8_t* levels = x.levels + chunk * Rows * kRowBytes + turn * kPairs * 4;
        A16Dots<V, Rows> dots;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p) dots.sum[p][r] = V::sums(x.start[2 * (chunk * Rows + r) + turn]);
#pragma GCC unroll 16
        for (int pair = 0; pair < kPairs; ++pair) {
            typename V::Ints pairs[kParts];
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p) pairs[p] = V::line(codes + pair * 64 + p * V::kLanes * 4);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
                for (int p = 0; p < kParts; ++p)
                    dots.sum[p][r] = V::dot_pair(dots.sum[p][r], pairs[p], levels + r * kRowBytes + pair * 4);
        }
        return dots;
    });
}

}  // namespace q4
