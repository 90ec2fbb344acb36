// Random programs: steps over buffers whose contents are remembered.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "case.hpp"

namespace q4test {

struct Buffer {
    uint8_t* data;
    int64_t bytes;
    std::vector<uint8_t> initial;
};

// A packed layer of a random case.
struct Layer {
    Case source;
    q4_layer layer;
    q4_call call;  // of that layer, without x and y

    float decoded(int64_t n, int64_t k) const;  // as the codec decodes: each operation is rounded to float32
};

struct Step {
    q4_step step;
    const Layer* layer = nullptr;
    int index_input = -1;
};

struct Made {
    std::vector<Step> steps;
    std::vector<Buffer> buffers;
    std::vector<std::unique_ptr<Layer>> layers;

    void restore() const;
};

Made make_program(uint64_t seed, Memory& memory);

// Bind and run; returns what went wrong.
std::string run_program(const std::vector<Step>& steps, int32_t isa, int threads);

}  // namespace q4test
