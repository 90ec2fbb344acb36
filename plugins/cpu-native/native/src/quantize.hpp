// int8 and int16 activations: 32 in-features share a scale, amax / the largest level; rounded to nearest, ties to even.
// Compiled per ISA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "codes.hpp"

namespace q4 {

// 32 numbers of any floating type to float32: returns the bits of the largest magnitude, of which NaN's are the largest.
template <class V> int32_t widen_chunk(const uint8_t* from, int32_t type, float* to, int32_t* large) {
    for (int k = 0; k < kChunk; k += V::kLanes) V::store(to + k, numbers<V>(type, from + k * size_of(type)));
    using Bits [[gnu::may_alias]] = int32_t;  // a copy would be written in parts that a whole load then waits for
    const auto* bits = reinterpret_cast<const Bits*>(to);
    int32_t most = 0;
    for (int j = 0; j < kChunk; ++j) most = std::max(most, static_cast<int32_t>(bits[j] & 0x7fffffff));
    // Here a nanosecond; a look of its own took up to a third of a small layer's time. By address: what is returned is waited for.
    *large = V::count_reaching(to, most - kSixteenth);
    return most;
}

// Returns the scale; whole levels up to `peak`, and the sum of each half's. NaN, with levels of 0, where integers can't hold
// the numbers: one is not finite, or amax / peak is below the normal numbers, by which levels would overflow. The caller
// computes such a row exactly. V distinguishes the copies of the instruction sets, of which the linker would otherwise keep
// any one.
template <class V> Q4_INLINE float whole_levels(const float* x, int32_t most, float peak, int32_t* whole, int32_t* sums) {
    float amax;
    std::memcpy(&amax, &most, 4);
    const float scale = amax / peak;
    sums[0] = sums[1] = 0;
    if (most == 0 || most >= 0x7f800000 || !(scale >= 1.1754944e-38f)) {
        std::memset(whole, 0, kChunk * 4);
        return most == 0 ? 0.0f : __builtin_nanf("");
    }
    for (int j = 0; j < kChunk; ++j) whole[j] = static_cast<int32_t>(std::nearbyintf(x[j] / scale));
    for (int j = 0; j < 16; ++j) sums[0] += whole[j];
    for (int j = 16; j < 32; ++j) sums[1] += whole[j];
    return scale;
}

template <class V> float quantize_chunk(const float* x, int32_t most, int8_t* levels, int32_t* sums) {
    int32_t whole[kChunk];
    const float scale = whole_levels<V>(x, most, 127.0f, whole, sums);
    for (int j = 0; j < kChunk; ++j) levels[j] = static_cast<int8_t>(whole[j]);
    return scale;
}

// Chunks as a whole, by vectors, where the instruction set has a function for one. Products with 1 / scale, divided only near a
// half, take longer than divisions.
template <class V> int64_t quantize_run(const float* x, int64_t chunks, const Quantized& to) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t place = chunk * to.rows;
        int32_t sums[2];
        if (!V::quantize_plain(x + chunk * kChunk, to.levels + place * kChunk, to.scale + place, sums)) return chunk;
        if (!to.has_halves) sums[0] += sums[1], sums[1] = 0;
        for (int half = 0; half < 2; ++half) {
            const auto sum = static_cast<float>(sums[half]);
            to.start[2 * place + half] = -to.center * sums[half];
            to.side[2 * place + half] = to.is_scaled ? sum * to.scale[place] : sum;
        }
    }
    return chunks;
}

template <class V> constexpr auto quantizer_of_runs() -> int64_t (*)(const float*, int64_t, const Quantized&) {
    if constexpr (V::kHasRuns) return quantize_run<V>;
    return nullptr;
}

// Of each eight in-features 0, 2, 4, 6, 1, 3, 5, 7: the order in which a16.hpp's pairs of levels want them.
template <class V> float quantize_word_chunk(const float* x, int32_t most, float peak, int8_t* levels, int32_t* sums) {
    int32_t whole[kChunk];
    const float scale = whole_levels<V>(x, most, peak, whole, sums);
    int16_t words[kChunk];
    for (int e = 0; e < kChunk; e += 8)  // in two runs: written one by one in the order of `whole`, they took three times as long
        for (int i = 0; i < 4; ++i) {
            words[e + i] = static_cast<int16_t>(whole[e + 2 * i]);
            words[e + 4 + i] = static_cast<int16_t>(whole[e + 2 * i + 1]);
        }
    std::memcpy(levels, words, sizeof words);
    return scale;
}

}  // namespace q4
