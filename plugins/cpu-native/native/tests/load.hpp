// A call large enough to be shared among threads, and the bits that it gives on one.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.hpp"

namespace q4test {

class Load {
  public:
    Load(uint64_t seed, int32_t family, int32_t isa, int64_t rows, int64_t columns, int64_t x_rows)
        : isa_(isa), codes_(static_cast<size_t>(rows * columns / 2)), scale_(static_cast<size_t>(rows * columns / 32)),
          x_(static_cast<size_t>(x_rows * columns)), y_(static_cast<size_t>(x_rows * rows)) {
        Random r(seed);
        for (uint8_t& byte : codes_) byte = static_cast<uint8_t>(r.next());
        for (float& number : scale_) number = static_cast<float>(r.uniform());
        for (float& number : x_) number = static_cast<float>(r.bell());
        matrix_.rows = rows, matrix_.columns = columns, matrix_.block = 32, matrix_.bits = 4, matrix_.scale_type = Q4_F32;
        for (int q = 0; q < 16; ++q) matrix_.codebook[q] = static_cast<float>(q - 8), matrix_.level[q] = static_cast<uint8_t>(q);
        matrix_.center = 8.0f, matrix_.step = 1.0f;
        tiles_.resize(static_cast<size_t>(q4_cpu_prepared_bytes(&matrix_)));
        call_.tiles = tiles_.data(), call_.x = x_.data(), call_.x_rows = x_rows, call_.x_stride = columns;
        call_.y = y_.data(), call_.y_stride = rows, call_.family = family;
    }
    Load(const Load&) = delete;
    Load& operator=(const Load&) = delete;

    // Pack and compute on one thread: what all later calls are compared with.
    void settle() {
        if (!packs(1) || !runs(1)) throw std::runtime_error("a plain call failed");
        packed_ = tiles_, wanted_ = y_;
    }

    bool packs(int32_t threads) {
        q4_source source{};
        source.codes = codes_.data(), source.code_row = source.group_bytes = matrix_.columns / 2, source.code_byte = 1;
        source.scale = reinterpret_cast<const uint8_t*>(scale_.data());
        source.scale_row = matrix_.columns / 32 * 4, source.scale_block = 4;
        std::fill(tiles_.begin(), tiles_.end(), uint8_t{0xee});
        return q4_cpu_pack(&matrix_, &source, tiles_.data(), threads) == 0 && (packed_.empty() || tiles_ == packed_);
    }

    bool runs(int32_t threads) {
        std::fill(y_.begin(), y_.end(), -1.0f);
        call_.threads = threads;
        return q4_cpu_linear(&matrix_, &call_, isa_) == 0 &&
               (wanted_.empty() || std::memcmp(y_.data(), wanted_.data(), y_.size() * sizeof(float)) == 0);
    }

  private:
    int32_t isa_;
    q4_matrix matrix_{};
    q4_call call_{};
    std::vector<uint8_t> codes_, tiles_, packed_;
    std::vector<float> scale_, x_, y_, wanted_;
};

}  // namespace q4test
