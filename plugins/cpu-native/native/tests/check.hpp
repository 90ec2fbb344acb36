// Runs a case through the C ABI and says what is wrong with what came back.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "reference.hpp"

namespace q4test {

struct Isa {
    const char* name;
    int32_t number;
};
// Those in a state of q4_cpu_has_isa: 1 that run here, 0 that this machine has not, -1 not compiled in.
std::vector<Isa> isas(int32_t state);

// Pack into tiles that the case keeps: empty where all is right.
std::string check_pack(const Case& c, Memory& memory, uint8_t*& tiles);
// What was packed comes back, whole and by rows.
std::string check_unpack(const Case& c, Memory& memory, const uint8_t* tiles);
// Every element lies in its interval, nothing else is written, and neither threads nor other rows change a bit.
// `after_call` may spoil what a call wrote.
std::string check_linear(const Case& c, Memory& memory, const uint8_t* tiles, const Isa& isa,
                         const std::vector<Interval>& intervals, const std::function<void()>& after_call = {});

}  // namespace q4test
