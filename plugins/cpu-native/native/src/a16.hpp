// w4i16: int16 activations, int32 dot products.
//
// Of eight in-features that stand in a line, levels 0 and 2, 4 and 6, 1 and 3, 5 and 7 of a row are pairs of 16 bits in the
// row's lane: masks give them where codes are their own levels, and a pair of activations is one broadcast. Activations
// have 16 bits of scale, amax / 32766, and tables of words beyond 4095 meet amax / 16383 (layout.hpp). What that errs by
// stands in docs/decisions/0026-int16-activations.md.
//
// Sums of 32 in-features stay within 31 bits for levels up to 255 (16 times 15 for those that masks leave in a high nibble),
// those of 16 for words up to 8191.
#pragma once

#include "a8.hpp"

namespace q4 {

// One row of x takes the codes in high nibbles as they are, 16 times too large, into sums of their own.
template <class V, int Rows, int Kind, bool Bytes> constexpr bool is_shifted_later() {
    return Rows == 1 && !Bytes && V::kPlainPairs != V::kLevelPairs && Kind == V::kPlainPairs;
}

// Pairs of levels of a chunk, decoded as they are read.
template <class V, int Kind, int Second, int ScaleType, bool Bytes, bool IsLater> struct A16Codes : Numbers<V, Second, ScaleType> {
    const typename V::template Pairs<Kind>& table;
    const uint8_t* codes;
    Q4_INLINE void octet(int eight, int part, typename V::Ints (&pair)[4]) const {
        const int lane = part * V::kLanes * 4;
        if constexpr (Bytes)
            V::byte_pairs(V::line(codes + eight * 128 + lane), V::line(codes + eight * 128 + 64 + lane), pair);
        else
            table.template pairs<IsLater>(V::line(codes + eight * 64 + lane), pair);
    }
};

template <class V> struct A16Panel : PanelNumbers<V> {
    Q4_INLINE void octet(int eight, int part, typename V::Ints (&pair)[4]) const {
        const uint8_t* from = this->panel.codes + (this->chunk * 4 + eight) * 256 + part * V::kLanes * 4;
#pragma GCC unroll 4
        for (int p = 0; p < 4; ++p) pair[p] = V::line(from + p * 64);
    }
};

// One chunk's share of the sums of one part of the lanes.
template <class V, int Rows, int Kind, int Second, bool Halves, bool IsLater, class Source>
Q4_INLINE void a16_chunk(const Source& source, const Activations& x, int64_t chunk, int part,
                         typename V::Floats (&sum)[Rows]) {
    constexpr bool kApart = Halves || Kind == V::kWordPairs;  // sums of words would overflow
    constexpr int kRowBytes = kChunk * 2;
    const int8_t* levels = x.levels + chunk * Rows * kRowBytes;
    const float* scale = x.scale + chunk * Rows;
    const int32_t* start = x.start + chunk * Rows * 2;
    const float* side = x.side + chunk * Rows * 2;
    typename V::Sums dots[Rows], high = V::sums(0);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        if (kApart || half == 0) {
            high = V::sums(0);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) dots[r] = V::sums(start[2 * r + half]);
        }
#pragma GCC unroll 2
        for (int eight = 2 * half; eight < 2 * half + 2; ++eight) {
            typename V::Ints pair[4];
            source.octet(eight, part, pair);
#pragma GCC unroll 4
            for (int p = 0; p < 4; ++p) {
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r) {
                    typename V::Sums& to = IsLater && p % 2 ? high : dots[r];
                    to = V::dot_pair(to, pair[p], levels + r * kRowBytes + eight * 16 + p * 4);
                }
            }
        }
        if (!kApart && half == 0) continue;
        if constexpr (IsLater) dots[0] = V::add_sixteenth(dots[0], high);  // a multiple of 16: nothing is lost
        add_set<V, Rows, Second>(source, Halves ? half : 0, part, scale, side,
                                 [&](int r) __attribute__((always_inline)) { return V::floats(dots[r]); }, sum);
    }
}

template <class V, int Rows, int Kind, int Second, int ScaleType, bool Bytes, bool Halves>
void a16_direct(const Tile& t, const Activations& x, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    constexpr bool kIsLater = is_shifted_later<V, Rows, Kind, Bytes>();
    const typename V::template Pairs<Kind> table(t.matrix);
    typename V::Floats sum[kParts][Rows];
    for (auto& part : sum)
        for (auto& row : part) row = V::zero();
    Stream<Bytes> stream(t.at, t.data, 0);
    for (int64_t chunk = 0; chunk < t.at.chunks; ++chunk, stream.next()) {
        stream.prefetch();
        const A16Codes<V, Kind, Second, ScaleType, Bytes, kIsLater> source{{t.matrix, t.at, stream.head}, table, stream.codes};
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part)
            a16_chunk<V, Rows, Kind, Second, Halves, kIsLater>(source, x, chunk, part, sum[part]);
    }
    for (int part = 0; part < kParts; ++part)
        for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + part * V::kLanes, sum[part][r]);
}

template <class V, int Kind, int Second, bool Bytes, bool Halves>
void a16_decode(const Tile& t, int64_t first, int64_t last, Panel& panel) {
    constexpr int kParts = kTileRows / V::kLanes, kSets = Halves ? 2 : 1;
    const typename V::template Pairs<Kind> table(t.matrix);
    Stream<Bytes> stream(t.at, t.data, first);
    uint8_t* to = panel.codes;
    float *scale = panel.scale, *second = panel.second;
    for (int64_t chunk = first; chunk < last; ++chunk, stream.next()) {
        stream.prefetch();
        const A16Codes<V, Kind, Second, kAnyType, Bytes, false> source{{t.matrix, t.at, stream.head}, table, stream.codes};
        for (int eight = 0; eight < 4; ++eight, to += 256)
            for (int part = 0; part < kParts; ++part) {
                typename V::Ints pair[4];
                source.octet(eight, part, pair);
                for (int p = 0; p < 4; ++p) V::store(to + p * 64 + part * V::kLanes * 4, pair[p]);
            }
        decode_numbers<V, Second, Halves>(source, scale, second);
        scale += kSets * kTileRows, second += kSets * kTileRows;
    }
}

template <class V, int Rows, int Kind, int Second, bool Halves>
void a16_panel(const Panel& panel, const Activations& x, int64_t chunks, float* y) {
    for (int part = 0; part < kTileRows / V::kLanes; ++part) {
        typename V::Floats sum[Rows];
        for (int r = 0; r < Rows; ++r) sum[r] = V::load(y + r * kTileRows + part * V::kLanes);
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            a16_chunk<V, Rows, Kind, Second, Halves, false>(A16Panel<V>{{panel, chunk, Halves ? 2 : 1}}, x, chunk, part, sum);
        for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + part * V::kLanes, sum[r]);
    }
}

}  // namespace q4
