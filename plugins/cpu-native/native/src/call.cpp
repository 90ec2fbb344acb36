// One call: rows of x to the kernel's order, tiles over threads, sums to y.
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "checks.hpp"
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

// Memory that one thread keeps from call to call: at most kScratchBytes, because rows of x go in batches.
constexpr int64_t kScratchBytes = 4 << 20;
template <class T> T* scratch(std::vector<T>& kept, int64_t count) {
    if (static_cast<int64_t>(kept.size()) < count) kept = std::vector<T>(static_cast<size_t>(count));
    return kept.data();
}
thread_local std::vector<float> t_values, t_scales, t_sums;
thread_local std::vector<int8_t> t_levels;

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

// Rows of x in one batch: what scratch holds, in whole passes.
int64_t batch_rows(const Layout& at, int most) {
    const int64_t row_bytes = at.chunks * (kChunk * 4 + 12);
    return std::max<int64_t>(1, kScratchBytes / row_bytes / most) * most;
}

void lay_out(const q4_matrix& m, const Layout& at, const q4_call& c, const Kernels& kernels, const Pass& pass,
             const int64_t* rows, float* values, int8_t* levels, float* scales, float* sums, uint8_t* odd) {
    for (int r = 0; r < pass.rows; ++r) {
        const int64_t row = rows[pass.first + r];
        bool is_odd = false;
        for (int64_t chunk = 0; chunk < at.chunks; ++chunk) {
            const int64_t k = chunk * kChunk, here = std::min<int64_t>(kChunk, m.columns - k);
            const int64_t place = pass.first * at.chunks + chunk * pass.rows + r;
            float buffer[kChunk] = {};
            float* x = levels ? buffer : values + place * kChunk;
            if (!levels && here < kChunk) std::fill(x + here, x + kChunk, 0.0f);
            read_floats(c.x, row * c.x_stride + k, here, c.x_type, x);
            if (!levels) continue;
            scales[place] = kernels.quantize(x, levels + place * kChunk, sums + place * 2);
            is_odd |= std::isnan(scales[place]);
        }
        odd[pass.first + r] = is_odd;
    }
}

// Compute the given rows of x, few enough for scratch; odd[i] tells which of them int8 can't hold.
void run(const q4_matrix& m, const Layout& at, const q4_call& c, const Kernels& kernels,
         const std::vector<int64_t>& rows, std::vector<uint8_t>& odd) {
    const auto count = static_cast<int64_t>(rows.size());
    const std::vector<Pass> plan = passes(count, kernels.most_rows);
    const bool rounds = c.family == Q4_A8;
    const int64_t places = count * at.chunks;
    float* values = rounds ? nullptr : scratch(t_values, places * kChunk);
    int8_t* levels = rounds ? scratch(t_levels, places * kChunk) : nullptr;
    float* scales = rounds ? scratch(t_scales, places) : nullptr;
    float* sums = rounds ? scratch(t_sums, places * 2) : nullptr;
    odd.assign(rows.size(), 0);
    parallel(static_cast<int64_t>(plan.size()), places * kChunk < 1 << 16 ? 1 : c.threads,
             [&](int64_t from, int64_t to, int) {
                 for (int64_t p = from; p < to; ++p)
                     lay_out(m, at, c, kernels, plan[static_cast<size_t>(p)], rows.data(), values, levels, scales, sums,
                             odd.data());
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
                for (int r = 0; r < pass.rows; ++r)
                    finish(m, c, t, rows[static_cast<size_t>(pass.first + r)], out + r * kTileRows);
            }
        }
    });
}

void run_all(const q4_matrix& m, const q4_call& c, const Kernels& kernels) {
    const Layout at(m);
    const int64_t most = batch_rows(at, kernels.most_rows);
    std::vector<int64_t> rows, again;
    std::vector<uint8_t> odd;
    q4_call exact = c;
    exact.family = Q4_EXACT;
    for (int64_t first = 0; first < c.x_rows; first += most) {
        rows.resize(static_cast<size_t>(std::min(most, c.x_rows - first)));
        std::iota(rows.begin(), rows.end(), first);
        run(m, at, c, kernels, rows, odd);
        // Rows that int8 can't hold (not finite, or below the normal numbers) are computed again, exactly.
        again.clear();
        for (size_t i = 0; i < rows.size(); ++i)
            if (odd[i]) again.push_back(rows[i]);
        if (!again.empty()) run(m, at, exact, kernels, again, odd);
    }
}

}  // namespace
}  // namespace q4

extern "C" int32_t q4_cpu_abi_version(void) { return Q4_CPU_ABI_VERSION; }

extern "C" int32_t q4_cpu_linear(const q4_matrix* matrix, const q4_call* call, int32_t isa) {
    if (!q4::is_sound(matrix) || !q4::is_sound(*matrix, call) || q4_cpu_has_isa(isa) != 1) return -1;
    q4::watch_forks();
    try {
        q4::run_all(*matrix, *call, *q4::kernels_of(isa));
    } catch (...) {  // no memory for scratch; nothing may be thrown across the C ABI
        return -2;
    }
    return 0;
}
