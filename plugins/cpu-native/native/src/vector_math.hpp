// exp and its relatives on a vector, each element by itself: within 1e-6 of the true value, subnormal results less so. A NaN
// stays one. The polynomials interpolate at Chebyshev points; next to each is its own largest relative error.
#pragma once

#include <cstdint>

#include "codes.hpp"

namespace q4 {

template <class V> struct Math {
    using F = typename V::Floats;
    typedef uint32_t U __attribute__((vector_size(sizeof(F))));

    Q4_INLINE static F splat(float v) { return V::splat(v); }
    Q4_INLINE static F most(F a, F b) { return V::most(a, b); }
    Q4_INLINE static F size(F x) { return (F)((U)x & 0x7fffffffu); }
    Q4_INLINE static F with_sign(F size, F from) { return (F)((U)size | ((U)from & 0x80000000u)); }

    template <int Count> Q4_INLINE static F polynomial(const float (&c)[Count], F x) {
        F sum = splat(c[Count - 1]);
#pragma GCC unroll 16
        for (int i = Count - 2; i >= 0; --i) sum = V::fma(sum, x, splat(c[i]));
        return sum;
    }

    // 2^n e^r with |r| <= ln 2 / 2; 2^n in two factors, so that neither overflows, and r in two steps, so that n ln 2 is exact.
    Q4_INLINE static F exp(F x) {
        return exp_within(V::least(splat(90.0f), most(splat(-105.0f), x)));
    }
    // The same of -128 … 90.
    Q4_INLINE static F exp_within(F x) {
        constexpr float kMagic = 12582912.0f;  // 1.5 · 2^23: what is added to it is rounded to a whole number
        static constexpr float kTail[] = {0.5f, 0.166665763f, 0.0416665524f, 0.00836323295f, 0.00139262504f};  // 1.1e-8
        const F raised = V::fma(x, splat(1.44269504f), splat(kMagic));
        const F n = V::sub(raised, splat(kMagic));
        const F r = V::fnma(n, splat(-2.12194440e-4f), V::fnma(n, splat(0.693359375f), x));
        const F tail = V::fma(V::mul(r, r), polynomial(kTail, r), r);
        if constexpr (V::kHasPower) return V::power(V::add(splat(1.0f), tail), n);
        const U whole = (U)raised - 0x4b400000u + 254u;  // n + 254, above 0
        const U half = whole >> 1;
        const F low = (F)(half << 23), high = (F)((whole - half) << 23);
        return V::mul(V::mul(V::add(splat(1.0f), tail), low), high);
    }
    Q4_INLINE static F sigmoid(F x) {  // of the negative size, which can't overflow
        const F e = exp((F)((U)x | 0x80000000u));
        return V::div(x < splat(0.0f) ? e : splat(1.0f), V::add(splat(1.0f), e));
    }
    Q4_INLINE static F tanh(F x) {
        static constexpr float kNear[] = {-0.333333284f, 0.133327678f, -0.0538506098f, 0.0209957547f, -0.00609464152f};  // 1.5e-8
        const F a = size(x), square = V::mul(x, x);
        const F near = V::fma(V::mul(square, x), polynomial(kNear, square), x);
        const F far = V::sub(splat(1.0f), V::div(splat(2.0f), V::add(splat(1.0f), exp(V::add(a, a)))));
        return a < splat(0.625f) ? near : with_sign(far, x);
    }
    // x Φ(x), where Φ(-a) = exp(-a² / 2) u q(u) and u = 1 / (1 + 0.3525 a); the part of a² that rounding drops is multiplied in.
    Q4_INLINE static F gelu(F x) {
        static constexpr float kTail[] = {0.140618891f, 0.140849307f,  0.120609984f, 0.104426436f,  -0.020853851f,
                                          0.152122945f, -0.253717363f, 0.146045744f, -0.0301021114f};  // 5.1e-8
        const F a = V::least(splat(16.0f), size(x));  // Φ(-15) is 0 in float32
        const F half = V::mul(a, splat(0.5f)), square = V::mul(a, half);
        const F dropped = V::fnma(a, half, square);
        const F u = V::reciprocal(V::fma(a, splat(0.3525f), splat(1.0f)));
        const F power = exp_within(V::sub(splat(0.0f), square));
        const F below = V::mul(V::fma(power, dropped, power), V::mul(u, polynomial(kTail, u)));
        return V::mul(x, x < splat(0.0f) ? below : V::sub(splat(1.0f), below));
    }
    Q4_INLINE static F gelu_tanh(F x) {  // x sigmoid(2 sqrt(2 / π) (x + 0.044715 x³))
        const F cube = V::mul(V::mul(x, x), x);
        return V::mul(x, sigmoid(V::mul(splat(1.59576912f), V::fma(cube, splat(0.044715f), x))));
    }
};

}  // namespace q4
