// Tests of the C ABI without Python:
//
//   q4_cpu_tests isas                       the instruction sets that run here, and which of these does unasked
//   q4_cpu_tests fuzz  COUNT SEED [ISA]     random cases, against float64; `fuzz 1 SEED` repeats one
//   q4_cpu_tests guard COUNT SEED [ISA]     the same, every buffer ending (or starting) at a page that may not be touched
//   q4_cpu_tests plant COUNT SEED [ISA]     the same with planted faults, each of which must be found
//   q4_cpu_tests program | program-guard COUNT SEED [ISA]   random programs, likewise
//   q4_cpu_tests spiking | spiking-guard COUNT SEED [ISA]   random circuits of spiking neurons, against plain loops
//   q4_cpu_tests threads | fork | bad [ISA] calls at once, calls after a fork, arguments that make no sense
//   q4_cpu_tests program-bad [ISA]          programs that make no sense, and how much memory a run takes: none
//   q4_cpu_tests patience               when calls stop sharing their work
//   q4_cpu_tests flaw heap | sign | race    what a sanitizer must stop: only where it does is it at work
//
// `--small` leaves out large cases, for where code is emulated or instrumented. Exit status 0: all is right; 1: not; 2: usage.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "commands.hpp"

namespace {

int usage() {
    std::fputs("usage: q4_cpu_tests isas | (fuzz | guard | plant | program | program-guard | spiking | spiking-guard) COUNT SEED [ISA] [--small] | (threads | fork | bad | program-bad) [ISA] |\n"
               "       q4_cpu_tests patience | flaw (heap | sign | race)\n",
               stderr);
    return 2;
}

}  // namespace

int main(int count, char** values) {
    using namespace q4test;
    Arguments arguments;
    std::vector<std::string> words;
    for (int i = 1; i < count; ++i) {
        if (std::string(values[i]) == "--small")
            arguments.sizes.has_large = false;
        else
            words.emplace_back(values[i]);
    }
    if (words.empty()) return usage();
    const std::string command = words[0];
    if (command == "patience") return patience();
    if (command == "flaw") return words.size() == 2 ? flaw(words[1]) : usage();
    arguments.isas = isas(1);
    if (command == "isas") {
        for (const Isa& isa : arguments.isas) std::puts(isa.name);
        for (const Isa& isa : isas(0)) std::fprintf(stderr, "%s: not on this machine\n", isa.name);
        const char* unasked = q4_cpu_isa_name(q4_cpu_best_isa());
        std::fprintf(stderr, "unasked: %s\n", unasked ? unasked : "none");
        return arguments.isas.empty() ? 1 : 0;
    }
    size_t next = 1;
    const bool is_program = command == "program" || command == "program-guard";
    const bool is_spiking = command == "spiking" || command == "spiking-guard";
    const bool is_random = command == "fuzz" || command == "guard" || command == "plant" || is_program || is_spiking;
    if (is_random) {
        if (words.size() < 3) return usage();
        arguments.count = std::strtoll(words[1].c_str(), nullptr, 10);
        arguments.seed = std::strtoull(words[2].c_str(), nullptr, 10);
        next = 3;
    }
    if (words.size() > next) {
        const std::vector<Isa> all = arguments.isas;
        arguments.isas.clear();
        for (const Isa& isa : all)
            if (words[next] == isa.name) arguments.isas.push_back(isa);
    }
    if (arguments.isas.empty()) {
        std::fputs("no such instruction set here\n", stderr);
        return 2;
    }
    if (command == "fuzz" || command == "guard") return fuzz(arguments, command == "guard");
    if (is_program) return programs(arguments, command == "program-guard");
    if (is_spiking) return circuits(arguments, command == "spiking-guard");
    if (command == "plant") return plant(arguments);
    if (command == "threads") return threads(arguments);
    if (command == "fork") return forks(arguments);
    if (command == "bad") return bad(arguments);
    if (command == "program-bad") return bad_programs(arguments);
    return usage();
}
