// What programs of spiking networks compute: membranes, thresholds, and what synapses send. Compiled per ISA. Products and sums are
// rounded one by one, so that the bits are those of the reference.
#pragma once

#include <cstring>

#include "codes.hpp"

namespace q4 {

template <class V> struct Lanes {
    using F = typename V::Floats;
    // The first `count` numbers, filled up with zeros.
    Q4_INLINE static F load(const float* from, int64_t count) {
        if (count >= V::kLanes) return V::load(from);
        alignas(64) float padded[V::kLanes] = {};
        std::memcpy(padded, from, static_cast<size_t>(count) * 4);
        return V::load(padded);
    }
    Q4_INLINE static F load(const Vector& from, int64_t at, int64_t count) {
        return from.is_one ? V::splat(*from.data) : load(from.data + at, count);
    }
    Q4_INLINE static void store(float* to, F v, int64_t count) {
        if (count >= V::kLanes) return V::store(to, v);
        alignas(64) float padded[V::kLanes];
        V::store(padded, v);
        std::memcpy(to, padded, static_cast<size_t>(count) * 4);
    }
};

template <class V>
void integrate(float* x, const float* i, const Vector& beta, const Vector& gain, const Vector& leak, int64_t count) {
    using L = Lanes<V>;
    using F = typename V::Floats;
    for (int64_t j = 0; j < count; j += V::kLanes) {
        const int64_t left = count - j;
        F current = L::load(i + j, left);
        if (gain.data) current = V::rounded(V::mul(L::load(gain, j, left), current));
        F sum = V::add(V::rounded(V::mul(L::load(beta, j, left), L::load(x + j, left))), current);
        if (leak.data) sum = V::add(sum, L::load(leak, j, left));
        L::store(x + j, sum, left);
    }
}

template <class V> uint64_t fire(const Firing& f) {
    using L = Lanes<V>;
    using F = typename V::Floats;
    const F zero = V::zero(), one = V::splat(1.0f);
    uint64_t word = 0;
    for (int64_t j = 0; j < f.columns; j += V::kLanes) {
        const int64_t left = f.columns - j;
        F mem = L::load(f.mem + j, left);
        const F threshold = L::load(f.threshold, j, left), vector = L::load(f.vector, j, left);
        F fires;  // 1 or 0
        if (f.count) {
            const F count = L::load(f.count + j, left);
            const auto is_held = count > zero;
            mem = is_held ? L::load(f.before + j, left) : mem;
            fires = f.is_inclusive ? (mem >= threshold ? one : zero) : (mem > threshold ? one : zero);
            fires = is_held ? zero : fires;
            const F less = V::sub(count, one);
            const F rest = less < zero ? zero : less;  // a NaN stays one
            L::store(f.count + j, fires > zero ? L::load(f.steps, j, left) : rest, left);
        } else {
            fires = f.is_inclusive ? (mem >= threshold ? one : zero) : (mem > threshold ? one : zero);
        }
        if (f.reset == 1) mem = V::sub(mem, V::rounded(V::mul(vector, fires)));
        if (f.reset == 2) mem = fires > zero ? vector : mem;
        if (f.reset || f.count) L::store(f.mem + j, mem, left);
        word |= static_cast<uint64_t>(V::ones(fires)) << j;
    }
    return f.columns < 64 ? word & ((uint64_t{1} << f.columns) - 1) : word;
}

namespace {

// float16 that is finite.
Q4_INLINE float from_half(uint16_t half) {
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;  // exact for subnormal numbers, too
    return half & 0x8000 ? -value : value;
}

// What bounds it is the ring's lines: each synapse changes one. Asking for them ahead gained nothing.
template <class Gap> void send_entries(const Sending& s, int64_t from, int64_t to, int64_t target) {
    const auto* gaps = static_cast<const Gap*>(s.synapses.gaps);
    const uint8_t* delays = s.synapses.delays;
    const int64_t* slots = s.slots;
    float* ring = s.ring + target;
    for (int64_t e = from; e < to;) {
        const int64_t block = e / 32, end = std::min(to, (block + 1) * 32);
        const float scale = from_half(s.synapses.levels[2 * block]), offset = from_half(s.synapses.levels[2 * block + 1]);
        const uint8_t* codes = s.synapses.codes + block * 16;
        alignas(64) float weight[32];
        for (int i = 0; i < 16; ++i) {  // the product is exact: whether it is rounded makes no difference
            weight[2 * i] = scale * static_cast<float>(codes[i] & 15) + offset;
            weight[2 * i + 1] = scale * static_cast<float>(codes[i] >> 4) + offset;
        }
        const float* w = weight - block * 32;
        for (; e < end; ++e) {
            ring += gaps[e];
            if (delays[e]) ring[slots[delays[e]]] += w[e];
        }
    }
}

void send(const Sending& s, int64_t from, int64_t to, int64_t target) {
    if (s.synapses.gap_bytes == 1)
        send_entries<uint8_t>(s, from, to, target);
    else
        send_entries<uint16_t>(s, from, to, target);
}

}  // namespace
}  // namespace q4
