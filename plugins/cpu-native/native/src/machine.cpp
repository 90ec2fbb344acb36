// Prints the instruction sets that this machine has, the preferred one first, as a list of CMake's: CMakeLists.txt runs it
// where Q4_CPU_ISAS is native, before any kernel is compiled.
#include <cstdio>

#define Q4_KERNELS_AVX2 none
#define Q4_KERNELS_AVXVNNI none
#define Q4_KERNELS_AVX512 none
#define Q4_KERNELS_NEON_DOTPROD none
#define Q4_KERNELS_NEON_I8MM none

#include "kernel.hpp"

namespace q4 {
static const Kernels& none() {
    static const Kernels kernels{};
    return kernels;
}
}  // namespace q4

#include "isa.cpp"

int main() {
    const char* separator = "";
    for (const int32_t was_run : {1, 0})
        for (int32_t isa = q4::kCount - 1; isa > Q4_ISA_NONE; --isa)
            if (q4_cpu_has_isa(isa) == 1 && q4_cpu_isa_was_run(isa) == was_run) {
                std::printf("%s%s", separator, q4_cpu_isa_name(isa));
                separator = ";";
            }
}
