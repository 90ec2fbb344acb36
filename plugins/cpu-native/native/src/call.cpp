// One call: rows of x to the kernels' order, tiles over threads, sums to y.
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "checks.hpp"
#include "product.hpp"
#include "threads.hpp"

namespace q4 {
namespace {

// Below this many bytes of weights times rows of x, a second thread costs more than it brings; of each family.
constexpr int64_t kThreadWork[] = {160 << 10, 320 << 10, 320 << 10};

// Memory that one thread keeps from call to call: about kScratchBytes at most, because rows of x go in batches.
constexpr int64_t kScratchBytes = 4 << 20, kLeastRowBytes = kChunk * 4, kMostRows = kScratchBytes / kLeastRowBytes;
template <class T> T* scratch(std::vector<T>& kept, int64_t count) {
    if (static_cast<int64_t>(kept.size()) < count) kept = std::vector<T>(static_cast<size_t>(count));
    return kept.data();
}
thread_local std::vector<Line> t_memory;
thread_local std::vector<float> t_tiles;
thread_local std::vector<Panel> t_panels;
thread_local std::vector<Pass> t_plan;
thread_local std::vector<int64_t> t_rows, t_again;
thread_local std::vector<uint8_t> t_odd;

constexpr int32_t kInfinity = 0x7f800000;
constexpr float kShrink = 18446744073709551616.0f;  // 2^64

// Take the outliers out of 32 numbers, from in-feature `first` on; returns the bits of the largest magnitude that remains.
int32_t take_outliers(const q4_matrix& m, const Layout& at, uint32_t found, int64_t first, float* values, Outlier* to) {
    int32_t most = 0;
    for (int j = 0; j < kChunk; ++j) {
        if (found >> j & 1) {
            *to++ = {place_of(m, at, first + j), values[j], static_cast<int32_t>(first + j)};
            values[j] = 0.0f;
        }
        int32_t bits;
        std::memcpy(&bits, values + j, 4);
        most = std::max(most, bits & 0x7fffffff);
    }
    return most;
}

// What stored columns meet, from `first` on: elements of a row in their order, and 0 behind the row's end.
void gather(const q4_matrix& m, const q4_inputs& inputs, const void* row, int size, int64_t first, uint8_t* to) {
    std::memset(to, 0, static_cast<size_t>(kChunk * size));
    const auto* from = static_cast<const uint8_t*>(row);
    const int64_t here = std::min<int64_t>(kChunk, m.columns - first);
    if (!inputs.order) std::memcpy(to, from + first * size, static_cast<size_t>(here * size));
    for (int64_t j = 0; inputs.order && j < here; ++j) {
        const int64_t place = inputs.order[first + j];
        if (place < 0 || place >= m.columns) continue;
        if (size == 4)
            std::memcpy(to + 4 * j, from + 4 * place, 4);
        else
            std::memcpy(to + 2 * j, from + 2 * place, 2);
    }
}

// Multiply 32 numbers by the factors of their in-features; returns what `widen` does.
int32_t apply_factor(const q4_matrix& m, const q4_inputs& inputs, const Kernels& kernels, int64_t first, float* values, int32_t* large) {
    alignas(64) uint8_t stored[kChunk * 4];
    alignas(64) float factor[kChunk];
    gather(m, inputs, inputs.factor, size_of(inputs.factor_type), first, stored);
    kernels.widen(stored, inputs.factor_type, factor, large);
    for (int j = 0; j < kChunk; ++j) factor[j] *= values[j];
    return kernels.widen(reinterpret_cast<const uint8_t*>(factor), Q4_F32, values, large);
}

// Lay the rows of one pass out.
void lay_out(const q4_matrix& m, const Layout& at, const q4_call& c, const Kernels& kernels, const Pass& pass,
             const int64_t* index, const Rows& to, uint8_t* odd) {
    const int size = size_of(c.x_type);
    const bool is_a16 = c.family == Q4_A16;
    // Signed levels are 128 less.
    const bool is_signed = is_a16 ? has_words(m) : kernels.is_wide_signed && has_wide_levels(m);
    const ChunkOrder arrange = is_a16 && pass.direct && pass.rows == 1 ? kernels.single_order(m) : nullptr;
    const float peak = word_peak(m);
    const int32_t center = static_cast<int32_t>(m.center) - (is_held_short(m) ? m.first : is_signed ? 128 : 0);
    const bool is_plain = c.family == Q4_A8 && c.x_type == Q4_F32 && !c.inputs.order && !c.inputs.factor && kernels.quantize_run;
    alignas(64) float buffer[kChunk];
    alignas(64) uint8_t tail[kChunk * 4];
    for (int r = 0; r < pass.rows; ++r) {
        const auto* x = static_cast<const uint8_t*>(c.x) + index[pass.first + r] * c.x_stride * size;
        bool is_odd = false, is_infinite = false;
        const int64_t row = pass.first + r, most_outliers = Rows::most_outliers(at);
        int64_t outliers = 0;
        for (int64_t chunk = 0; chunk < at.chunks; ++chunk) {
            if (is_plain) {
                const int64_t place = pass.first * at.chunks + chunk * pass.rows + r;
                chunk += kernels.quantize_run(reinterpret_cast<const float*>(x) + chunk * kChunk, m.columns / kChunk - chunk,
                                              {to.levels + place * kChunk, to.scale + place, to.start + 2 * place, to.side + 2 * place,
                                               pass.rows, center, at.sets == 2, m.second == Q4_OFFSET});
                if (chunk == at.chunks) break;
            }
            const int64_t k = chunk * kChunk, here = std::min<int64_t>(kChunk, m.columns - k);
            const int64_t place = pass.first * at.chunks + chunk * pass.rows + r;
            const uint8_t* from = x + k * size;
            if (here < kChunk || c.inputs.order) {
                gather(m, c.inputs, x, size, k, tail);
                from = tail;
            }
            float* values = to.values ? to.values + place * kChunk : buffer;
            int32_t large, most = kernels.widen(from, c.x_type, values, &large);
            if (c.inputs.factor) most = apply_factor(m, c.inputs, kernels, k, values, &large);
            is_odd |= most > kHuge;
            if (to.values) {
                is_infinite |= most >= kInfinity;
                continue;
            }
            if (const uint32_t found = large > kMostLarge || is_odd ? 0 : kernels.find_outliers(values)) {
                const int64_t count = __builtin_popcount(found);
                is_odd = outliers + count > most_outliers;
                if (!is_odd) most = take_outliers(m, at, found, k, values, to.outliers + row * most_outliers + outliers);
                outliers += count;
            }
            int32_t sums[2];
            int8_t* levels = to.levels + place * to.chunk_bytes;
            const float scale = is_a16 ? kernels.quantize_words(values, most, peak, levels, sums)
                                       : kernels.quantize(values, most, levels, sums);
            if (arrange) arrange(levels);
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
            is_odd = !is_infinite;  // with an infinity in the row nothing can be saved
            for (int64_t k = 0; is_odd && k < at.chunks * kChunk; ++k)
                to.values[(pass.first * at.chunks + k / kChunk * pass.rows + r) * kChunk + k % kChunk] /= kShrink;
        }
        odd[row] = is_odd;
        if (to.outlier_count) to.outlier_count[row] = static_cast<int32_t>(outliers);
    }
    if (c.family != Q4_A8 || !kernels.pair_rows || pass.rows == 1) return;
    for (int64_t chunk = 0; chunk < at.chunks; ++chunk)
        kernels.pair_rows(to.levels + (pass.first * at.chunks + chunk * pass.rows) * kChunk, pass.rows);
}

// Of the first row of y.
Finish finish_of(const q4_matrix& m, const q4_call& c, int64_t tile) {
    const int64_t first = tile * kTileRows, size = size_of(c.y_type);
    Finish f{};
    f.step = c.family == Q4_EXACT ? 1.0f : c.family == Q4_A16 && has_words(m) ? m.word_step : m.step;
    f.is_global_per_row = c.global_count > 1;
    f.global = c.global_scale && f.is_global_per_row ? c.global_scale + first : c.global_scale;
    f.divides = c.global_divides != 0;
    f.bias = c.bias ? static_cast<const uint8_t*>(c.bias) + first * size : nullptr;
    f.growth = kShrink;
    f.y = static_cast<uint8_t*>(c.y) + first * size;
    f.y_bytes = c.y_stride * size;
    f.type = c.y_type;
    f.count = std::min<int64_t>(kTileRows, m.rows - first);
    return f;
}

}  // namespace

int64_t batch_rows(const Layout& at, int most, int threads) {
    const int64_t row_bytes = std::max(at.chunks * kLeastRowBytes, int64_t{threads} * kTileRows * 4);
    return std::max<int64_t>(1, kScratchBytes / row_bytes / most) * most;
}

void Product::lay_out(int64_t first_pass, int64_t last_pass) const {
    for (int64_t p = first_pass; p < last_pass; ++p) q4::lay_out(m, at, c, kernels, passes[p], index, rows, odd);
}

void Product::tiles(int64_t first, int64_t last, Panel* panel, float* sums) const {
    const int64_t most_outliers = Rows::most_outliers(at);
    const OutlierKernel multiply_outliers = kernels.outliers(m);
    Columns* columns = has_panels && rows.outlier_count ? &panel->columns : nullptr;
    if (columns) columns->clear();
    for (int64_t i = 0; columns && i < count; ++i)
        for (int32_t j = 0; j < rows.outlier_count[i] && !odd[i]; ++j) columns->add(rows.outliers[i * most_outliers + j]);
    const ColumnDecoder decode_columns = columns && columns->count ? kernels.columns(m) : nullptr;
    alignas(64) double outliers[Finish::kMost * kTileRows];
    uint64_t special[kMostRows / Finish::kMost];  // rows that are shrunk, or have outliers: as bits
    for (int64_t first_row = 0; first_row < count; first_row += Finish::kMost) {
        uint64_t bits = 0;
        for (int64_t i = first_row; i < std::min<int64_t>(count, first_row + Finish::kMost); ++i)
            bits |= uint64_t{c.family == Q4_EXACT ? odd[i] != 0 : rows.has_outliers(i) && !odd[i]} << (i - first_row);
        special[first_row / Finish::kMost] = bits;
    }
    // Sums of the rows from `from` up to `to`.
    const auto deliver = [&](const Tile& tile, Finish& f, int64_t from, int64_t to, const float* given) {
        for (int64_t begin = from, end; begin < to; given += (end - begin) * kTileRows, begin = end) {
            end = std::min(to, (begin / Finish::kMost + 1) * Finish::kMost);
            const uint64_t bits = special[begin / Finish::kMost] >> begin % Finish::kMost & ~uint64_t{0} >> (Finish::kMost - (end - begin));
            (c.family == Q4_EXACT ? f.shrunk : f.with_outliers) = bits;
            for (uint64_t left = f.with_outliers; left; left &= left - 1) {
                const int64_t place = __builtin_ctzll(left), i = begin + place;
                multiply_outliers(tile, rows.outliers + i * most_outliers, rows.outlier_count[i], columns, outliers + place * kTileRows);
            }
            f.index = index + begin;
            kernels.finish(f, given, static_cast<int>(end - begin));
        }
    };
    const auto direct = [&](const Tile& tile, Finish& f) {
        alignas(64) float few[8 * kTileRows];
        for (const Pass* pass = passes; pass < passes + pass_count; ++pass) {
            pass->direct(tile, rows.from(at, *pass, 0), few);
            deliver(tile, f, pass->first, pass->first + pass->rows, few);
        }
    };
    const PanelDecoder decode = has_panels ? kernels.decoder(m, c.family) : nullptr;
    constexpr int64_t kStretches[] = {kExactPanelChunks, kA8PanelChunks, kA16PanelChunks};
    const int64_t stretch = kStretches[c.family];
    const auto panelled = [&](const Tile& tile, Finish& f) {
        std::fill(sums, sums + count * kTileRows, 0.0f);
        for (int64_t chunk = 0; chunk < at.chunks; chunk += stretch) {
            const int64_t end = std::min(at.chunks, chunk + stretch);
            decode(tile, chunk, end, *panel);
            for (const Pass* pass = passes; pass < passes + pass_count; ++pass)
                pass->panel(*panel, rows.from(at, *pass, chunk), end - chunk, sums + pass->first * kTileRows);
        }
        if (decode_columns) decode_columns(tile, *columns);
        deliver(tile, f, 0, count, sums);
    };
    for (int64_t t = first; t < last; ++t) {
        const Tile tile{m, at, c.tiles + t * at.tile_bytes};
        Finish f = finish_of(m, c, t);
        f.outliers = outliers;
        if (has_panels)
            panelled(tile, f);
        else
            direct(tile, f);
    }
}

namespace {

// Compute the given rows of x, few enough for scratch; odd[i]: see Product.
void run(const q4_matrix& m, const Layout& at, const q4_call& c, const Kernels& kernels,
         const std::vector<int64_t>& index, std::vector<uint8_t>& odd) {
    const auto count = static_cast<int64_t>(index.size());
    const bool has_panels = count >= kernels.panel_from[c.family];
    t_plan.clear();
    each_pass(m, c.family, kernels, count, has_panels, [](const Pass& pass) { t_plan.push_back(pass); });
    const int64_t bytes = Rows::bytes(at, c.family, count);
    const Rows rows(at, c.family, count, scratch(t_memory, bytes / int64_t{sizeof(Line)})->bytes);
    odd.assign(index.size(), 0);
    const Product product{m, at, c, kernels, t_plan.data(), static_cast<int64_t>(t_plan.size()), count, has_panels,
                          index.data(), rows, odd.data()};
    parallel(product.pass_count, count * at.chunks * kChunk < 1 << 16 ? 1 : c.threads,
             [&](int64_t from, int64_t to, int) { product.lay_out(from, to); });
    if (c.outlier_rows) *c.outlier_rows += rows.count_outliers(count);
    const int threads = at.tiles * at.tile_bytes * count < kThreadWork[c.family] ? 1 : team_size(at.tiles, c.threads);
    Panel* panels = has_panels ? scratch(t_panels, threads) : nullptr;
    float* tiles = has_panels ? scratch(t_tiles, threads * count * kTileRows) : nullptr;
    parallel(at.tiles, threads, [&](int64_t from, int64_t to, int thread) {
        product.tiles(from, to, panels + (has_panels ? thread : 0), tiles + (has_panels ? thread * count * kTileRows : 0));
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
