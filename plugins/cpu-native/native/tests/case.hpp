// One random case: a matrix, where its source lies, and one call. Everything follows from the seed.
#pragma once

#include <string>
#include <vector>

#include "memory.hpp"
#include "numbers.hpp"
#include "random.hpp"

namespace q4test {

struct Case {
    uint64_t seed;
    q4_matrix matrix;
    q4_source source;
    q4_call call;     // without tiles
    uint8_t* y_start;  // all that rows of y and the gaps between them take
    int64_t y_bytes;
    int64_t blocks;
    bool is_whole;    // made of whole numbers, so that float32 sums may be exact
    bool is_extreme;  // all codes at the highest level, many x at an end: where narrow sums would overflow

    // What the bytes mean, read back from where they lie by the header's words.
    std::vector<uint8_t> codes;                    // [N, K]
    std::vector<double> scale, second;             // [N, blocks], with those of super-blocks
    std::vector<uint8_t> scale_bytes, second_bytes;  // [N, blocks] as stored
    std::vector<double> x;                         // [M, K], as stored columns meet it
    std::vector<double> global, bias;              // [N]

    void read_source();
    void read_call();
    std::string told() const;

    double input(int64_t i, int64_t k) const;      // what column k meets
    uint8_t* code_at(int64_t n, int64_t k) const;  // the byte that holds the code
    uint8_t code(int64_t n, int64_t k) const;
    uint8_t* number_at(bool is_second, int64_t n, int64_t block) const;
    double byte_value(uint8_t code) const;  // of an 8-bit code, before the second number
    // What a super-block multiplies a stored number by; 1 without.
    double super_number(bool is_second, int64_t n, int64_t block) const;
    void* y_at(int64_t m, int64_t n) const;
};

// Limits on a case: where instructions are emulated or instrumented, large ones take too long.
struct Sizes {
    bool has_large = true;
};

Case make_case(uint64_t seed, Memory& memory, const Sizes& sizes);

}  // namespace q4test
