// One call: rows of x to the kernel's order, tiles over threads, sums to y.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernel.hpp"
#include "threads.hpp"

namespace q4 {
namespace {

float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023, out;
    if (exponent == 31)
        out = sign | 0x7f800000u | fraction << 13;
    else if (exponent)
        out = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        float value = static_cast<float>(fraction) * 5.9604645e-8f;  // 2^-24
        std::memcpy(&out, &value, 4);
        out |= sign;
    }
    float value;
    std::memcpy(&value, &out, 4);
    return value;
}

uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to infinity
    if (bits < 0x38800000) {                                             // subnormal: let the adder round
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &magnitude, 4);
        return static_cast<uint16_t>(sign | (rounded - 0x3f000000));
    }
    bits += 0xc8000fff + (bits >> 13 & 1);  // rebias, round to nearest even
    return static_cast<uint16_t>(sign | bits >> 13);
}

float bf16_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void read_floats(const void* from, int64_t first, int64_t count, int32_t type, float* to) {
    if (type == Q4_F32) {
        std::memcpy(to, static_cast<const float*>(from) + first, static_cast<size_t>(count) * 4);
        return;
    }
    const auto* in = static_cast<const uint16_t*>(from) + first;
    for (int64_t j = 0; j < count; ++j) to[j] = type == Q4_BF16 ? bf16_to_float(in[j]) : half_to_float(in[j]);
}

float read_float(const void* from, int64_t index, int32_t type) {
    float value;
    read_floats(from, index, 1, type, &value);
    return value;
}

void write_float(void* to, int64_t index, int32_t type, float value) {
    if (type == Q4_F32)
        static_cast<float*>(to)[index] = value;
    else
        static_cast<uint16_t*>(to)[index] = type == Q4_BF16 ? float_to_bf16(value) : float_to_half(value);
}

// Memory that one thread keeps from call to call; as large as the largest call so far.
template <class T> T* scratch(std::vector<T>& kept, int64_t count) {
    if (static_cast<int64_t>(kept.size()) < count) kept.resize(static_cast<size_t>(count));
    return kept.data();
}
thread_local std::vector<float> t_values, t_scales, t_sums;
thread_local std::vector<int8_t> t_levels;
thread_local std::vector<uint8_t> t_odd;

struct Pass {
    int64_t first;
    int rows;
};

// Rows in passes of powers of two, the largest first.
std::vector<Pass> passes(int64_t count, int most) {
    std::vector<Pass> out;
    for (int64_t row = 0; row < count;) {
        int rows = most;
        while (rows > count - row) rows /= 2;
        out.push_back({row, rows});
        row += rows;
    }
    return out;
}

void finish(const q4_matrix& m, const q4_call& c, int64_t tile, int64_t row, const float* sums) {
    const int64_t first = tile * kTileRows, count = std::min<int64_t>(kTileRows, m.rows - first);
    const float step = c.family == Q4_A8 ? m.step : 1.0f;
    for (int64_t r = 0; r < count; ++r) {
        float value = sums[r] * step;
        if (c.global_scale) {
            const float global = c.global_scale[c.global_count > 1 ? first + r : 0];
            value = c.global_divides ? value / global : value * global;
        }
        if (c.bias) value += read_float(c.bias, first + r, c.y_type);
        write_float(c.y, row * c.y_stride + first + r, c.y_type, value);
    }
}

void run(const q4_matrix& m, const Layout& at, const q4_call& c, const Kernels& kernels,
         const std::vector<int64_t>* chosen) {
    const int64_t count = chosen ? static_cast<int64_t>(chosen->size()) : c.x_rows;
    const std::vector<Pass> plan = passes(count, kernels.most_rows);
    const bool rounds = c.family == Q4_A8;
    const int64_t width = at.chunks * kChunk;
    float* values = rounds ? nullptr : scratch(t_values, count * width);
    int8_t* levels = rounds ? scratch(t_levels, count * width) : nullptr;
    float* scales = rounds ? scratch(t_scales, count * at.chunks) : nullptr;
    float* sums = rounds ? scratch(t_sums, count * at.chunks * 2) : nullptr;
    uint8_t* odd = scratch(t_odd, c.x_rows);
    const auto source_row = [&](int64_t row) { return chosen ? (*chosen)[static_cast<size_t>(row)] : row; };
    const int threads_x = count * width < 1 << 16 ? 1 : c.threads;
    parallel(static_cast<int64_t>(plan.size()), threads_x, [&](int64_t from, int64_t to, int) {
        std::vector<float> row_values(rounds ? static_cast<size_t>(width) : 0);
        for (int64_t p = from; p < to; ++p) {
            const Pass& pass = plan[static_cast<size_t>(p)];
            for (int r = 0; r < pass.rows; ++r) {
                const int64_t row = source_row(pass.first + r);
                if (rounds) {
                    float* x = row_values.data();
                    read_floats(c.x, row * c.x_stride, m.columns, c.x_type, x);
                    std::fill(x + m.columns, x + width, 0.0f);
                    bool is_odd = false;
                    for (int64_t chunk = 0; chunk < at.chunks; ++chunk) {
                        const int64_t place = pass.first * at.chunks + chunk * pass.rows + r;
                        const float scale = kernels.quantize(x + chunk * kChunk, levels + place * kChunk, sums + place * 2);
                        scales[place] = scale;
                        is_odd |= std::isnan(scale);
                    }
                    odd[row] = is_odd;
                } else {
                    float buffer[kChunk];
                    for (int64_t chunk = 0; chunk < at.chunks; ++chunk) {
                        const int64_t k = chunk * kChunk, here = std::min<int64_t>(kChunk, m.columns - k);
                        read_floats(c.x, row * c.x_stride + k, here, c.x_type, buffer);
                        std::fill(buffer + here, buffer + kChunk, 0.0f);
                        const int64_t place = pass.first * at.chunks + chunk * pass.rows + r;
                        std::memcpy(values + place * kChunk, buffer, sizeof buffer);
                    }
                }
            }
        }
    });
    const int threads = at.tiles * at.tile_bytes * count < 200 * 1024 ? 1 : c.threads;
    parallel(at.tiles, threads, [&](int64_t from, int64_t to, int) {
        alignas(64) float out[8 * kTileRows];
        for (int64_t t = from; t < to; ++t) {
            const Tile tile{m, at, c.tiles + t * at.tile_bytes};
            for (const Pass& pass : plan) {
                const int64_t place = pass.first * at.chunks;
                const Activations x = rounds ? Activations{nullptr, levels + place * kChunk, scales + place, sums + place * 2}
                                             : Activations{values + place * kChunk, nullptr, nullptr, nullptr};
                kernels.tile(m, c.family, pass.rows)(tile, x, out);
                for (int r = 0; r < pass.rows; ++r) finish(m, c, t, source_row(pass.first + r), out + r * kTileRows);
            }
        }
    });
}

}  // namespace
}  // namespace q4

extern "C" int32_t q4_cpu_abi_version(void) { return Q4_CPU_ABI_VERSION; }

extern "C" int32_t q4_cpu_best_isa(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        return Q4_ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return Q4_ISA_AVX2;
    return Q4_ISA_NONE;
}

extern "C" int32_t q4_cpu_linear(const q4_matrix* matrix, const q4_call* call, int32_t isa) {
    if (!q4::is_sound(*matrix) || call->x_rows < 1 || isa == Q4_ISA_NONE || isa > q4_cpu_best_isa()) return -1;
    q4::watch_forks();
    const q4::Kernels& kernels = isa == Q4_ISA_AVX512 ? q4::kernels_avx512() : q4::kernels_avx2();
    const q4::Layout at(*matrix);
    q4::run(*matrix, at, *call, kernels, nullptr);
    if (call->family != Q4_A8) return 0;
    // Rows that int8 can't hold (not finite, or below the normal numbers) are computed again, exactly.
    std::vector<int64_t> odd;
    for (int64_t row = 0; row < call->x_rows; ++row)
        if (q4::t_odd[static_cast<size_t>(row)]) odd.push_back(row);
    if (!odd.empty()) {
        q4_call exact = *call;
        exact.family = Q4_EXACT;
        q4::run(*matrix, at, exact, kernels, &odd);
    }
    return 0;
}
