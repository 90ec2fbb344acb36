// The dot products of a vector's rows with Rows rows of x, each row of x by itself.
#pragma once

#include <type_traits>

#include "codes.hpp"

namespace q4 {

template <class Dot, int Rows> struct EachRow {
    static constexpr int kRowBytes = kChunk;
    Dot dot[Rows];

    Q4_INLINE void begin(const int32_t* start) {
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) dot[r].begin(start[2 * r]);
    }
    // Two steps of a chunk: the levels of its in-features 4 * step … + 3, and of the next four.
    template <class Ints> Q4_INLINE void add(Ints first, Ints others, const int8_t* x, int step) {
        if constexpr (Dot::kIsPaired) {
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) dot[r].add_two(first, others, x + r * kChunk + step * 4);
            return;
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) dot[r].add(first, x + r * kChunk + step * 4);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) dot[r].add(others, x + r * kChunk + step * 4 + 4);
    }
    Q4_INLINE void half() {
        for (int r = 0; r < Rows; ++r) dot[r].half();
    }
    Q4_INLINE auto floats(int row) { return dot[row].floats(); }
};

// The same of int16 activations with one row of x; of a chunk the lower bytes come first.
template <class Dot> struct ByteRow {
    static constexpr int kRowBytes = 2 * kChunk;
    Dot dot;

    Q4_INLINE void begin(const int32_t* start) { dot.begin(*start); }
    template <class Ints> Q4_INLINE void add(Ints first, Ints others, const int8_t* x, int step) {
        dot.add(first, x + step * 4, x + step * 4 + kChunk);
        dot.add(others, x + step * 4 + 4, x + step * 4 + 4 + kChunk);
    }
    Q4_INLINE void half() { dot.half(); }
    Q4_INLINE auto floats(int) { return dot.floats(); }
};

}  // namespace q4
