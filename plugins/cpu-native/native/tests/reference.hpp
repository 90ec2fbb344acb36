// What a call may give, element by element: the formulas of q4_cpu.h in float64, and a bound derived from float32.
#pragma once

#include <vector>

#include "case.hpp"

namespace q4test {

struct Interval {
    enum Kind : uint8_t { BETWEEN, NOT_A_NUMBER, ANYTHING } kind;
    double low, high;  // both rounded to y's type

    bool holds(double y) const {
        return kind == ANYTHING || (kind == NOT_A_NUMBER ? y != y : low <= y && y <= high);
    }
    bool excludes(const Interval& other) const {
        if (kind == ANYTHING || other.kind == ANYTHING) return false;
        if (kind != other.kind) return true;
        return kind == BETWEEN && (high < other.low || other.high < low);
    }
};

// [M, N]
std::vector<Interval> expected(const Case& c);

}  // namespace q4test
