// Exact: float32 activations times exactly decoded codes.
#pragma once

#include "codes.hpp"

namespace q4 {

// Whether few rows take whole numbers times V::kRaise, which spares an operation a weight; sums of a half chunk are brought
// down again. That changes no bit of a whole number's products, subnormal ones included, and leaves them room: 2^7 times 2^90 (the
// largest x) times 2^24, 16 times. A second number need not be whole, nor small.
template <class V, int Second, bool Bytes, class Book> constexpr bool is_raised() {
    if constexpr (V::kRaise == 1.0f || Second != Q4_NONE) return false;
    else return Bytes || Book::kRaises;
}

// A line of 4-bit codes of 8 in-features, or bytes of 4: those that short codes are made of differ from them by `base`.
template <class V, int Bits>
Q4_INLINE typename V::Ints exact_codes(const uint8_t* codes, int line, int part, typename V::Ints base) {
    if constexpr (is_short<Bits>()) return V::add_bytes(short_codes<V, Bits>(codes, line, part), base);
    return V::line(codes + line * 64 + part * V::kLanes * 4);
}

// Call use(k, weight) for the in-features of one line, in order. `line` is 8 in-features of 4-bit codes, or 4 of bytes.
template <class V, bool Bytes, bool IsRaised, class Book, class Use>
Q4_INLINE void exact_line(typename V::Ints line, const Book& book, const Use& use) {
    if constexpr (Bytes && IsRaised) {
        use(0, V::template raised_byte<0>(line));
        use(1, V::template raised_byte<1>(line));
        use(2, V::template raised_byte<2>(line));
        use(3, V::template raised_byte<3>(line));
    } else if constexpr (IsRaised) {
        const typename Book::Line codes = book.line(line);
        use(0, book.template raised_at<0>(codes));
        use(1, book.template raised_at<2>(codes));
        use(2, book.template raised_at<4>(codes));
        use(3, book.template raised_at<6>(codes));
        use(4, book.template raised_at<1>(codes));
        use(5, book.template raised_at<3>(codes));
        use(6, book.template raised_at<5>(codes));
        use(7, book.template raised_at<7>(codes));
    } else if constexpr (Bytes) {
        use(0, V::template signed_byte<0>(line));
        use(1, V::template signed_byte<1>(line));
        use(2, V::template signed_byte<2>(line));
        use(3, V::template signed_byte<3>(line));
    } else {
        const typename Book::Line codes = book.line(line);
        use(0, book.template at<0>(codes));
        use(1, book.template at<2>(codes));
        use(2, book.template at<4>(codes));
        use(3, book.template at<6>(codes));
        use(4, book.template at<1>(codes));
        use(5, book.template at<3>(codes));
        use(6, book.template at<5>(codes));
        use(7, book.template at<7>(codes));
    }
}

// The value of one column's codes, before base and second number; `codes` is the address of its place.
template <class V, int Bits, class Book>
Q4_INLINE typename V::Floats column_values(const uint8_t* codes, const Place& place, int part, const Book& book, typename V::Ints base) {
    codes += part * V::kLanes * 4;
    if constexpr (is_short<Bits>()) {
        const Fields of = fields_of(Bits, place.step);
        const int shift = place.shift - of.field[0].from;
        typename V::Ints all = base;
        for (int i = 0; i < of.count; ++i) {
            const Field& f = of.field[i];
            const auto line = V::line(codes + (f.line - of.field[0].line) * 64);
            all = V::add_bytes(all, V::lifted(V::shifted(line, shift + f.from), f.mask(), f.to));
        }
        return V::template signed_byte<0>(all);
    } else {
        const auto line = V::shifted(V::line(codes), place.shift);
        if constexpr (Bits == 8)
            return V::template signed_byte<0>(line);
        else
            return book.template at<0>(book.line(line));
    }
}

// A code's value with its second number; the scale is left to the end of a half chunk unless there is an offset. What a byte
// lacks to its code's value is added first: 0 where there is no second number.
template <class V, int Second, bool Bytes>
Q4_INLINE typename V::Floats with_second(typename V::Floats value, typename V::Floats s, typename V::Floats z, typename V::Floats base) {
    if constexpr (Bytes && Second != Q4_NONE) value = V::add(value, base);
    if constexpr (Second == Q4_ZERO) return V::sub(value, z);
    if constexpr (Second == Q4_OFFSET) return V::fma(s, value, z);  // rounded once, as an exact weight is
    return value;
}

// What a half chunk's sum is multiplied by. A unit is a power of two, and 1 wherever there is a second number.
template <class V, int Second, bool Bytes, class Book>
Q4_INLINE typename V::Floats half_scale(typename V::Floats s, const Book& book) {
    if constexpr (Second == Q4_OFFSET) return V::splat(1.0f);
    return Bytes ? s : V::mul(s, V::splat(book.unit));
}

template <class V, int Rows, int Second, int Bits, class Book>
void exact_direct(const Tile& t, const Activations& x, float* y) {
    constexpr bool Bytes = Bits != 4;
    constexpr int kParts = kTileRows / V::kLanes;
    constexpr bool kIsRaised = is_raised<V, Second, Bytes, Book>();
    using F = typename V::Floats;
    const Book book(t.matrix.codebook);
    const bool halves = t.at.sets == 2;
    const F base = V::splat(byte_base(t.matrix));
    const auto bytes = V::splat_bytes(short_base(t.matrix));
    F sum[kParts][Rows];
    for (auto& part : sum)
        for (F& row : part) row = V::zero();
    Stream<Bits> stream(t.at, t.data, 0);
    for (int64_t chunk = 0; chunk < t.at.chunks; ++chunk, stream.next()) {
        stream.prefetch();
        const Numbers<V, Second, kAnyType> of{t.matrix, t.at, stream.head, stream.super};
        const float* values = x.values + chunk * Rows * kChunk;
        // One row of x is a chain of sums for each half and part, which take turns so that none waits for itself; more rows
        // fill the registers with one half of one part.
        constexpr int kLines = Bytes ? 4 : 2, kStep = Bytes ? 4 : 8;  // of half a chunk
        constexpr int kHalves = Rows == 1 && kParts < 4 ? 2 : 1, kTogether = Rows == 1 ? kParts : 1;
#pragma GCC unroll 1
        for (int first_part = 0; first_part < kParts; first_part += kTogether)
#pragma GCC unroll 1
            for (int first_half = 0; first_half < 2; first_half += kHalves) {
                F partial[kHalves][kTogether][Rows], s[kHalves][kTogether], z[kHalves][kTogether];
#pragma GCC unroll 2
                for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 4
                    for (int p = 0; p < kTogether; ++p) {
                        s[h][p] = of.scale(halves ? first_half + h : 0, first_part + p);
                        z[h][p] = of.second(halves ? first_half + h : 0, first_part + p);
                        for (int r = 0; r < Rows; ++r) partial[h][p][r] = V::zero();
                    }
#pragma GCC unroll 4
                for (int l = 0; l < kLines; ++l)
#pragma GCC unroll 2
                    for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 4
                        for (int p = 0; p < kTogether; ++p) {
                            const auto line = exact_codes<V, Bits>(stream.codes, (first_half + h) * kLines + l, first_part + p, bytes);
                            const float* from = values + (first_half + h) * 16 + l * kStep;
                            exact_line<V, Bytes, kIsRaised>(line, book, [&](int k, F value) __attribute__((always_inline)) {
                                const F w = with_second<V, Second, Bytes>(value, s[h][p], z[h][p], base);
#pragma GCC unroll 16
                                for (int r = 0; r < Rows; ++r)
                                    partial[h][p][r] = V::fma(w, V::splat(from[r * kChunk + k]), partial[h][p][r]);
                            });
                        }
#pragma GCC unroll 2
                for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 4
                    for (int p = 0; p < kTogether; ++p) {
                        const F by = half_scale<V, Second, Bytes>(s[h][p], book);
                        F(&to)[Rows] = sum[first_part + p];
                        for (int r = 0; r < Rows; ++r) {
                            F whole = partial[h][p][r];
                            if constexpr (kIsRaised) whole = V::mul(whole, V::splat(1.0f / V::kRaise));
                            to[r] = V::fma(by, whole, to[r]);
                        }
                    }
            }
    }
    for (int part = 0; part < kParts; ++part)
        for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + part * V::kLanes, sum[part][r]);
}

template <class V, int Second, int Bits, class Book>
void exact_decode(const Tile& t, int64_t first, int64_t last, Panel& panel) {
    constexpr bool Bytes = Bits != 4;
    constexpr int kParts = kTileRows / V::kLanes, kLines = Bytes ? 8 : 4, kStep = Bytes ? 4 : 8;
    using F = typename V::Floats;
    const Book book(t.matrix.codebook);
    const bool halves = t.at.sets == 2;
    const F base = V::splat(byte_base(t.matrix));
    const auto bytes = V::splat_bytes(short_base(t.matrix));
    Stream<Bits> stream(t.at, t.data, first);
    auto* to = reinterpret_cast<float*>(panel.codes);
    float* scale = panel.scale;
    for (int64_t chunk = first; chunk < last; ++chunk, stream.next(), to += kChunk * kTileRows, scale += 2 * kTileRows) {
        stream.prefetch();
        const Numbers<V, Second, kAnyType> of{t.matrix, t.at, stream.head, stream.super};
#pragma GCC unroll 8
        for (int l = 0; l < kLines; ++l)
            for (int part = 0; part < kParts; ++part) {
                const int half = 2 * l / kLines, lane = part * V::kLanes;
                const F s = of.scale(halves ? half : 0, part), z = of.second(halves ? half : 0, part);
                if (l * 2 % kLines == 0) V::store(scale + half * kTileRows + lane, half_scale<V, Second, Bytes>(s, book));
                const auto line = exact_codes<V, Bits>(stream.codes, l, part, bytes);
                exact_line<V, Bytes, false>(line, book, [&](int k, F value) __attribute__((always_inline)) {
                    V::store(to + (l * kStep + k) * kTileRows + lane, with_second<V, Second, Bytes>(value, s, z, base));
                });
            }
    }
}

template <class V, int Rows> void exact_panel(const Panel& panel, const Activations& x, int64_t chunks, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    using F = typename V::Floats;
    const auto* weights = reinterpret_cast<const float*>(panel.codes);
    for (int64_t half = 0; half < 2 * chunks; ++half, weights += kChunk / 2 * kTileRows) {
        const float* values = x.values + half / 2 * Rows * kChunk + half % 2 * 16;
        F partial[Rows][kParts];
        for (auto& row : partial)
            for (F& part : row) part = V::zero();
        for (int k = 0; k < 16; ++k) {
            F w[kParts];
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) w[part] = V::load(weights + k * kTileRows + part * V::kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const F value = V::splat(values[r * kChunk + k]);
#pragma GCC unroll 4
                for (int part = 0; part < kParts; ++part) partial[r][part] = V::fma(w[part], value, partial[r][part]);
            }
        }
        for (int part = 0; part < kParts; ++part) {
            const F s = V::load(panel.scale + half * kTileRows + part * V::kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                float* sum = y + r * kTileRows + part * V::kLanes;
                V::store(sum, V::fma(s, partial[r][part], V::load(sum)));
            }
        }
    }
}

}  // namespace q4
