// One call: rows of x to the kernels' order, tiles over threads, sums to y.
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "checks.hpp"
#include "kernel.hpp"
#include "threads.hpp"

namespace q4 {
namespace {

// Below this many bytes of codes times rows of x, a second thread costs more than it brings.
constexpr int64_t kThreadWork = 200 * 1024;

// Memory that one thread keeps from call to call: about kScratchBytes at most, because rows of x go in batches.
constexpr int64_t kScratchBytes = 4 << 20;
template <class T> T* scratch(std::vector<T>& kept, int64_t count) {
    if (static_cast<int64_t>(kept.size()) < count) kept = std::vector<T>(static_cast<size_t>(count));
    return kept.data();
}
thread_local std::vector<float> t_values, t_scales, t_sides, t_tiles;
thread_local std::vector<int8_t> t_levels;
thread_local std::vector<int32_t> t_starts;
thread_local std::vector<Panel> t_panels;

struct Pass {
    int64_t first;
    int rows;
    DirectKernel direct;  // one of the two, which serves this many rows
    PanelKernel panel;
};
thread_local std::vector<Pass> t_plan;
thread_local std::vector<int64_t> t_rows, t_again;
thread_local std::vector<uint8_t> t_odd;

// Rows in passes: of the family's own number as long as they last, then of powers of two.
const std::vector<Pass>& passes(const q4_matrix& m, int32_t family, const Kernels& kernels, int64_t count, bool has_panels) {
    std::vector<Pass>& out = t_plan;
    out.clear();
    const int power = kernels.direct_rows, most = has_panels ? kernels.panel_rows[family] : power;
    for (int64_t row = 0; row < count;) {
        int rows = most;
        if (rows > count - row)
            for (rows = power; rows > count - row;) rows /= 2;
        out.push_back({row, rows, has_panels ? nullptr : kernels.direct(m, family, rows),
                       has_panels ? kernels.panel(m, family, rows) : nullptr});
        row += rows;
    }
    return out;
}

// Rows of x in one batch: what scratch holds of them, and of each thread's sums, in whole passes.
int64_t batch_rows(const Layout& at, int most, int threads) {
    const int64_t row_bytes = std::max<int64_t>(at.chunks * kChunk * 4, int64_t{threads} * kTileRows * 4);
    return std::max<int64_t>(1, kScratchBytes / row_bytes / most) * most;
}

// Rows of x as the kernels read them.
struct Rows {
    float* values = nullptr;
    int8_t* levels = nullptr;
    float* scale = nullptr;
    int32_t* start = nullptr;
    float* side = nullptr;
    int64_t chunk_bytes = kChunk;  // of levels

    Rows(const Layout& at, int32_t family, int64_t count) {
        const int64_t places = count * at.chunks;
        if (family == Q4_EXACT) {
            values = scratch(t_values, places * kChunk);
            return;
        }
        if (family == Q4_A16) chunk_bytes *= 2;
        levels = scratch(t_levels, places * chunk_bytes);
        scale = scratch(t_scales, places);
        start = scratch(t_starts, places * 2);
        side = scratch(t_sides, places * 2);
    }
    // The given chunk on of the pass whose rows begin at `first`.
    Activations from(const Layout& at, const Pass& pass, int64_t chunk) const {
        const int64_t place = pass.first * at.chunks + chunk * pass.rows;
        if (values) return {values + place * kChunk, nullptr, nullptr, nullptr, nullptr};
        return {nullptr, levels + place * chunk_bytes, scale + place, start + place * 2, side + place * 2};
    }
};

// Bits of 2^90: products of larger numbers might pass float32's end before they are scaled. Rows with such are computed
// exactly, divided by a power of two and multiplied by it at the end.
constexpr int32_t kHuge = 217 << 23, kInfinity = 0x7f800000;
constexpr float kShrink = 18446744073709551616.0f;  // 2^64

// Lay the rows of one pass out; odd[i] tells which of them int8 or int16 can't hold, or are shrunk (exact).
void lay_out(const q4_matrix& m, const Layout& at, const q4_call& c, const Kernels& kernels, const Pass& pass,
             const int64_t* index, const Rows& to, uint8_t* odd) {
    const int size = size_of(c.x_type);
    const bool is_a16 = c.family == Q4_A16;
    // A signed level's zero is the code's own.
    const bool is_signed = is_a16 ? has_words(m) : kernels.is_wide_signed && has_wide_levels(m);
    const float peak = word_peak(m);
    const auto center = is_signed ? 0 : static_cast<int32_t>(m.bits == 8 ? 128 : m.center);
    alignas(64) float buffer[kChunk];
    alignas(64) uint8_t tail[kChunk * 4];
    for (int r = 0; r < pass.rows; ++r) {
        const auto* x = static_cast<const uint8_t*>(c.x) + index[pass.first + r] * c.x_stride * size;
        bool is_odd = false, is_infinite = false;
        for (int64_t chunk = 0; chunk < at.chunks; ++chunk) {
            const int64_t k = chunk * kChunk, here = std::min<int64_t>(kChunk, m.columns - k);
            const int64_t place = pass.first * at.chunks + chunk * pass.rows + r;
            const uint8_t* from = x + k * size;
            if (here < kChunk) {
                std::memset(tail, 0, sizeof tail);
                from = static_cast<uint8_t*>(std::memcpy(tail, from, static_cast<size_t>(here * size)));
            }
            float* values = to.values ? to.values + place * kChunk : buffer;
            const int32_t most = kernels.widen(from, c.x_type, values);
            is_odd |= most > kHuge;
            if (to.values) {
                is_infinite |= most >= kInfinity;
                continue;
            }
            int32_t sums[2];
            int8_t* levels = to.levels + place * to.chunk_bytes;
            const float scale = is_a16 ? kernels.quantize_words(values, most, peak, levels, sums)
                                       : kernels.quantize(values, most, levels, sums);
            to.scale[place] = scale;
            is_odd |= std::isnan(scale);
            if (at.sets == 1) sums[0] += sums[1], sums[1] = 0;
            for (int half = 0; half < 2; ++half) {
                const auto sum = static_cast<float>(sums[half]);
                to.start[2 * place + half] = -center * sums[half];
                to.side[2 * place + half] = m.second == Q4_OFFSET ? sum * scale : sum;
            }
        }
        if (to.values && is_odd) {
            is_odd = !is_infinite;  // beside what is infinite nothing can be saved
            for (int64_t k = 0; is_odd && k < at.chunks * kChunk; ++k)
                to.values[(pass.first * at.chunks + k / kChunk * pass.rows + r) * kChunk + k % kChunk] /= kShrink;
        }
        odd[pass.first + r] = is_odd;
    }
    if (c.family != Q4_A8 || !kernels.pair_rows || pass.rows == 1) return;
    for (int64_t chunk = 0; chunk < at.chunks; ++chunk)
        kernels.pair_rows(to.levels + (pass.first * at.chunks + chunk * pass.rows) * kChunk, pass.rows);
}

Finish finish_of(const q4_matrix& m, const q4_call& c, int64_t tile, int64_t row, bool is_odd) {
    const int64_t first = tile * kTileRows, size = size_of(c.y_type);
    Finish f{};
    f.step = c.family == Q4_EXACT ? 1.0f : c.family == Q4_A16 && has_words(m) ? m.word_step : m.step;
    f.growth = c.family == Q4_EXACT && is_odd ? kShrink : 1.0f;
    f.is_global_per_row = c.global_count > 1;
    f.global = c.global_scale && f.is_global_per_row ? c.global_scale + first : c.global_scale;
    f.divides = c.global_divides != 0;
    f.bias = c.bias ? static_cast<const uint8_t*>(c.bias) + first * size : nullptr;
    f.y = static_cast<uint8_t*>(c.y) + (row * c.y_stride + first) * size;
    f.type = c.y_type;
    f.count = std::min<int64_t>(kTileRows, m.rows - first);
    return f;
}

// Compute the given rows of x, few enough for scratch; odd[i]: see lay_out.
void run(const q4_matrix& m, const Layout& at, const q4_call& c, const Kernels& kernels,
         const std::vector<int64_t>& index, std::vector<uint8_t>& odd) {
    const auto count = static_cast<int64_t>(index.size());
    const bool has_panels = count >= kernels.panel_from[c.family];
    const std::vector<Pass>& plan = passes(m, c.family, kernels, count, has_panels);
    const Rows rows(at, c.family, count);
    odd.assign(index.size(), 0);
    parallel(static_cast<int64_t>(plan.size()), count * at.chunks * kChunk < 1 << 16 ? 1 : c.threads,
             [&](int64_t from, int64_t to, int) {
                 for (int64_t p = from; p < to; ++p)
                     lay_out(m, at, c, kernels, plan[static_cast<size_t>(p)], index.data(), rows, odd.data());
             });
    const int threads = at.tiles * at.tile_bytes * count < kThreadWork ? 1 : team_size(at.tiles, c.threads);
    Panel* panels = has_panels ? scratch(t_panels, threads) : nullptr;
    float* tiles = has_panels ? scratch(t_tiles, threads * count * kTileRows) : nullptr;
    const auto deliver = [&](int64_t t, int64_t i, const float* sums) {
        const auto at_row = static_cast<size_t>(i);
        kernels.finish(finish_of(m, c, t, index[at_row], odd[at_row] != 0), sums);
    };
    const auto direct = [&](const Tile& tile, int64_t t) {
        alignas(64) float sums[8 * kTileRows];
        for (const Pass& pass : plan) {
            pass.direct(tile, rows.from(at, pass, 0), sums);
            for (int r = 0; r < pass.rows; ++r) deliver(t, pass.first + r, sums + r * kTileRows);
        }
    };
    const PanelDecoder decode = has_panels ? kernels.decoder(m, c.family) : nullptr;
    constexpr int64_t kStretches[] = {kExactPanelChunks, kA8PanelChunks, kA16PanelChunks};
    const int64_t stretch = kStretches[c.family];
    const auto panelled = [&](const Tile& tile, int64_t t, Panel& panel, float* sums) {
        std::fill(sums, sums + count * kTileRows, 0.0f);
        for (int64_t first = 0; first < at.chunks; first += stretch) {
            const int64_t last = std::min(at.chunks, first + stretch);
            decode(tile, first, last, panel);
            for (const Pass& pass : plan)
                pass.panel(panel, rows.from(at, pass, first), last - first, sums + pass.first * kTileRows);
        }
        for (int64_t r = 0; r < count; ++r) deliver(t, r, sums + r * kTileRows);
    };
    parallel(at.tiles, threads, [&](int64_t from, int64_t to, int thread) {
        for (int64_t t = from; t < to; ++t) {
            const Tile tile{m, at, c.tiles + t * at.tile_bytes};
            if (has_panels)
                panelled(tile, t, panels[thread], tiles + thread * count * kTileRows);
            else
                direct(tile, t);
        }
    });
}

void run_all(const q4_matrix& m, const q4_call& c, const Kernels& kernels) {
    const Layout at(m);
    const int64_t most = batch_rows(at, kernels.panel_rows[c.family], team_size(at.tiles, c.threads));
    std::vector<int64_t>&rows = t_rows, &again = t_again;
    std::vector<uint8_t>& odd = t_odd;
    q4_call exact = c;
    exact.family = Q4_EXACT;
    for (int64_t first = 0; first < c.x_rows; first += most) {
        rows.resize(static_cast<size_t>(std::min(most, c.x_rows - first)));
        std::iota(rows.begin(), rows.end(), first);
        run(m, at, c, kernels, rows, odd);
        if (c.family == Q4_EXACT) continue;
        // Rows that int8 or int16 can't hold (not finite, huge, or below the normal numbers) are computed again, exactly.
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
