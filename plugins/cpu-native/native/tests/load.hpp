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
        matrix_.rows = rows, matrix_.columns = columns, matrix_.block = 32, matrix_.bits = matrix_.held_bits = 4, matrix_.scale_type = Q4_F32;
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

    q4_layer layer() const { return {matrix_, tiles_.data(), nullptr, 0, 0, call_.family, {}}; }

  private:
    int32_t isa_;
    q4_matrix matrix_{};
    q4_call call_{};
    std::vector<uint8_t> codes_, tiles_, packed_;
    std::vector<float> scale_, x_, y_, wanted_;
};

// A program that is shared among threads: blocks of a norm, two products, an activation and a sum, and attention.
class ProgramLoad {
  public:
    ProgramLoad(uint64_t seed, int32_t family, int32_t isa, int32_t threads)
        : up_(seed, family, isa, 4 * kWidth, kWidth, 1), down_(seed + 1, family, isa, kWidth, 4 * kWidth, 1), x_(kWidth), start_(kWidth),
          norm_(kWidth, 1.0f), inner_(4 * kWidth), out_(kWidth), cache_(kWidth * kPositions) {
        up_.packs(1), down_.packs(1);
        Random r(seed);
        for (float& number : start_) number = static_cast<float>(r.bell());
        const q4_layer up = up_.layer(), down = down_.layer();
        std::vector<q4_step> steps;
        const q4_view x = view(x_), norm = view(norm_), inner = view(inner_), out = view(out_);
        const q4_view position{&position_, 1, 1, 1}, heads = as_heads(out), cache{cache_.data(), kWidth / 64 * kPositions, 64, 64};
        for (int block = 0; block < 6; ++block) {
            steps.push_back({Q4_RMS_NORM, 2, 1, 2, {x, norm}, {out}, {1e-5, 0.0}, nullptr});
            steps.push_back({Q4_STORE, 2, 1, 0, {heads, position}, {cache}, {}, nullptr});
            steps.push_back({Q4_ATTENTION, 4, 1, 3, {as_heads(x), cache, cache, position}, {heads}, {kWidth / 64, 0.1, 0.0}, nullptr});
            steps.push_back({Q4_LINEAR, 1, 1, 1, {out}, {inner}, {0.0}, &up});
            steps.push_back({Q4_SILU, 1, 1, 0, {inner}, {inner}, {}, nullptr});
            steps.push_back({Q4_LINEAR, 1, 1, 1, {inner}, {out}, {0.0}, &down});
            steps.push_back({Q4_AFFINE, 1, 1, 2, {out}, {out}, {0.01, 0.0}, nullptr});
            steps.push_back({Q4_ADD, 2, 1, 0, {x, out}, {x}, {}, nullptr});
        }
        status_ = q4_cpu_program_make(steps.data(), static_cast<int64_t>(steps.size()), threads, isa, nullptr, nullptr, 0, &program_);
    }
    ProgramLoad(const ProgramLoad&) = delete;
    ProgramLoad& operator=(const ProgramLoad&) = delete;
    ~ProgramLoad() { q4_cpu_program_free(program_); }

    void settle() {
        if (status_ != 0 || !runs(1)) throw std::runtime_error("a plain program failed");
        wanted_ = x_;
    }
    void reset() { x_ = start_, std::fill(cache_.begin(), cache_.end(), 0.5f); }
    int32_t run(int32_t threads) { return q4_cpu_program_run(program_, threads, 1, nullptr, nullptr); }
    bool runs(int32_t threads) {
        reset();
        return run(threads) == 0 && (wanted_.empty() || std::memcmp(x_.data(), wanted_.data(), x_.size() * sizeof(float)) == 0);
    }

  private:
    static constexpr int64_t kWidth = 512, kPositions = 8;
    static q4_view view(std::vector<float>& from) { return {from.data(), 1, static_cast<int64_t>(from.size()), static_cast<int64_t>(from.size())}; }
    static q4_view as_heads(const q4_view& v) { return {v.data, v.columns / 64, 64, 64}; }

    Load up_, down_;
    std::vector<float> x_, start_, norm_, inner_, out_, cache_, wanted_;
    int64_t position_ = kPositions - 1;
    q4_program* program_ = nullptr;
    int32_t status_;
};

}  // namespace q4test
