// The dot products of a vector's rows with Rows rows of x, each row of x by itself.
#pragma once

#include "layout.hpp"

namespace q4 {

template <class Dot, int Rows> struct EachRow {
    Dot dot[Rows];

    // Eight in-features: `low` holds the levels of the first four, `high` of the others.
    template <bool Narrow, class Ints> [[gnu::always_inline]] void add(Ints low, Ints high, const int8_t* x) {
        for (int r = 0; r < Rows; ++r) {
            dot[r].template add<Narrow>(low, x + r * kChunk);
            dot[r].template add<Narrow>(high, x + r * kChunk + 4);
        }
    }
    // After each half chunk.
    template <bool Narrow> [[gnu::always_inline]] void half() {
        for (Dot& one : dot) one.template half<Narrow>();
    }
    [[gnu::always_inline]] auto floats(int row) const { return dot[row].floats(); }
};

}  // namespace q4
