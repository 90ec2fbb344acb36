// int8 activations: 32 in-features share a scale, amax / 127; rounded to nearest, ties to even. Compiled per ISA.
#pragma once

#include <cmath>
#include <cstdint>

namespace q4 {

// Not finite in, NaN out: the caller computes such a row exactly. V tells the copies of the instruction sets apart, of
// which the linker would otherwise keep any one.
template <class V> float quantize_chunk(const float* x, int8_t* levels, float* sums) {
    float amax = 0.0f;
    for (int j = 0; j < 32; ++j) amax = std::fabs(x[j]) > amax ? std::fabs(x[j]) : amax;
    bool finite = true;
    for (int j = 0; j < 32; ++j) finite &= std::fabs(x[j]) <= 3.4028234e38f;
    if (!finite) {
        sums[0] = sums[1] = __builtin_nanf("");
        for (int j = 0; j < 32; ++j) levels[j] = 0;
        return __builtin_nanf("");
    }
    const float scale = amax / 127.0f;
    // Where amax / 127 underflows, levels computed by it would overflow.
    if (!(scale >= 1.1754944e-38f)) {
        if (amax == 0.0f) {
            sums[0] = sums[1] = 0.0f;
            for (int j = 0; j < 32; ++j) levels[j] = 0;
            return 0.0f;
        }
        sums[0] = sums[1] = __builtin_nanf("");
        for (int j = 0; j < 32; ++j) levels[j] = 0;
        return __builtin_nanf("");  // below the smallest normal number: computed exactly as well
    }
    int32_t half[2] = {0, 0};
    for (int h = 0; h < 2; ++h) {
        int32_t sum = 0;
        for (int j = 0; j < 16; ++j) {
            const int32_t level = static_cast<int32_t>(std::nearbyintf(x[16 * h + j] / scale));
            levels[16 * h + j] = static_cast<int8_t>(level);
            sum += level;
        }
        half[h] = sum;
    }
    sums[0] = static_cast<float>(half[0]);
    sums[1] = static_cast<float>(half[1]);
    return scale;
}

}  // namespace q4
