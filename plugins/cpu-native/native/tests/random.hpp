// Random choices that are the same on every machine: a seed is all that a failure needs to be repeated.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace q4test {

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {
        for (int i = 0; i < 4; ++i) next();
    }

    uint64_t next() {  // splitmix64
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }

    int64_t between(int64_t first, int64_t last) {
        return first + static_cast<int64_t>(next() % static_cast<uint64_t>(last - first + 1));
    }
    bool chance(double share) { return uniform() < share; }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    double bell() { return uniform() + uniform() + uniform() + uniform() - 2.0; }  // near enough to normal
    template <class T> T of(std::initializer_list<T> choices) {
        return choices.begin()[next() % choices.size()];
    }

  private:
    uint64_t state_;
};

}  // namespace q4test
