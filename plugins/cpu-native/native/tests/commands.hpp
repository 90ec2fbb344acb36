// What the program can be asked for; each returns its exit status.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"

namespace q4test {

struct Arguments {
    int64_t count = 1000;
    uint64_t seed = 1;
    std::vector<Isa> isas;
    Sizes sizes;
};

int fuzz(const Arguments& arguments, bool is_guarded);
int plant(const Arguments& arguments);
int programs(const Arguments& arguments, bool is_guarded);
int circuits(const Arguments& arguments, bool is_guarded);
int bad_programs(const Arguments& arguments);
int threads(const Arguments& arguments);
int forks(const Arguments& arguments);
int bad(const Arguments& arguments);
int patience();
int flaw(const std::string& kind);

}  // namespace q4test
