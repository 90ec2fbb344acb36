// Which instruction sets there are, which of them were compiled in, and which this machine has.
#include "checks.hpp"
#include "kernel.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace q4 {
namespace {

// Q4_KERNELS_… is the function that gives a set's kernels, or nullptr where it was not compiled in (CMakeLists.txt).
struct Isa {
    const char* name;
    bool was_run;  // on hardware, with all tests passed: this is the one list of these
    const Kernels& (*kernels)();
};
constexpr Isa kIsas[] = {
    // in the order of q4_isa
    {"none", false, nullptr},
    {"avx2", true, Q4_KERNELS_AVX2},
    {"avxvnni", true, Q4_KERNELS_AVXVNNI},
    {"avx512", true, Q4_KERNELS_AVX512},
    {"neon-dotprod", false, Q4_KERNELS_NEON_DOTPROD},
    {"neon-i8mm", false, Q4_KERNELS_NEON_I8MM},
};
constexpr int32_t kCount = sizeof kIsas / sizeof *kIsas;

struct Machine {
    bool has[kCount] = {};

    Machine() {
#if defined(__x86_64__)
        // The compiler's own questions ask also whether the operating system keeps the registers.
        __builtin_cpu_init();
        has[Q4_ISA_AVX2] =
            __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        has[Q4_ISA_AVX512] = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
        unsigned a = 0, b = 0, c = 0, d = 0;  // not every compiler knows AVX-VNNI by name
        has[Q4_ISA_AVXVNNI] = has[Q4_ISA_AVX2] && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#elif defined(__aarch64__) && defined(__linux__)
        // Bits of the kernel's <asm/hwcap.h>, which an old one may not name.
        has[Q4_ISA_NEON_DOTPROD] = getauxval(AT_HWCAP) >> 20 & 1;                                 // ASIMDDP
        has[Q4_ISA_NEON_I8MM] = has[Q4_ISA_NEON_DOTPROD] && (getauxval(AT_HWCAP2) >> 13 & 1);  // I8MM
#endif
    }
};

// Asked once: `cpuid` leaves a virtual machine, which takes longer than a small call.
const Machine& machine() {
    static const Machine found;
    return found;
}

bool is_one(int32_t isa) { return isa > Q4_ISA_NONE && isa < kCount; }

}  // namespace

const Kernels* kernels_of(int32_t isa) { return is_one(isa) && kIsas[isa].kernels ? &kIsas[isa].kernels() : nullptr; }

}  // namespace q4

extern "C" const char* q4_cpu_isa_name(int32_t isa) { return q4::is_one(isa) ? q4::kIsas[isa].name : nullptr; }

extern "C" int32_t q4_cpu_has_isa(int32_t isa) {
    if (!q4::is_one(isa) || !q4::kIsas[isa].kernels) return -1;
    return q4::machine().has[isa] ? 1 : 0;
}

extern "C" int32_t q4_cpu_isa_was_run(int32_t isa) { return q4::is_one(isa) && q4::kIsas[isa].was_run ? 1 : 0; }

extern "C" int64_t q4_cpu_panel_from(int32_t isa, int32_t family) {
    const q4::Kernels* kernels = q4::kernels_of(isa);
    if (!kernels || !q4::is_family(family) || kernels->panel_from[family] == INT64_MAX) return 0;
    return kernels->panel_from[family];
}

extern "C" int32_t q4_cpu_best_isa(void) {
    for (int32_t isa = q4::kCount - 1; isa > Q4_ISA_NONE; --isa)
        if (q4::kIsas[isa].was_run && q4_cpu_has_isa(isa) == 1) return isa;
    return Q4_ISA_NONE;
}
