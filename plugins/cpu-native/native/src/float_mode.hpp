// The floating-point mode in which results are defined: rounded to nearest, subnormal numbers preserved. A caller may have set
// another one in its own thread, where a scale of 2^-127 would be zero, and the other threads of the team would not have it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace q4 {

class FloatMode {
  public:
    FloatMode() : before_(get()) {
        if (before_ != kPlain) set(kPlain);
    }
    ~FloatMode() {
        if (before_ != kPlain) set(before_);
    }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
#if defined(__x86_64__)
    using Word = uint32_t;
    static constexpr Word kPlain = 0x1f80;  // every exception masked, none seen
    static Word get() { return _mm_getcsr() & ~Word{0x3f}; }  // without the exceptions that were seen
    static void set(Word mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word kPlain = 0;
    static Word get() {
        Word mode;
        __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set(Word mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
    using Word = int;
    static constexpr Word kPlain = 0;
    static Word get() { return kPlain; }
    static void set(Word) {}
#endif
    Word before_;
};

}  // namespace q4
