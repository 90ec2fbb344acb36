// One call of the sparse product: where each spike's numbers lie, then tiles over threads.
#include <cstring>
#include <vector>

#include "checks.hpp"
#include "product.hpp"
#include "threads.hpp"

namespace q4 {
namespace {

// Below this many spikes times tiles, a second thread costs more than it brings.
constexpr int64_t kThreadWork = 32 * 1024;
// Rows go in batches of about this many spikes.
constexpr int64_t kBatchSpikes = 1 << 16;
thread_local std::vector<Spike> t_spikes;
thread_local std::vector<int64_t> t_starts;  // of each row of a batch in t_spikes, and where the last one ends

// Add the spikes of a row of bytes.
void add_row(const q4_matrix& m, const Layout& at, const uint8_t* x, const int64_t* order) {
    t_starts.push_back(static_cast<int64_t>(t_spikes.size()));
    int64_t last_half = -1;
    const auto add = [&](int64_t column) {
        Spike spike{place_of(m, at, column), 0.0f, 0.0f};
        const int64_t half = column / 16;
        spike.keep = half == last_half ? 1.0f : 0.0f;
        spike.ends = 1.0f;
        if (half == last_half) t_spikes.back().ends = 0.0f;
        last_half = half;
        t_spikes.push_back(spike);
    };
    for (int64_t column = 0; order && column < m.columns; ++column)
        if (order[column] >= 0 && order[column] < m.columns && x[order[column]]) add(column);
    if (order) return;
    for (int64_t k = 0; k < m.columns; k += 8) {
        uint64_t eight = 0;
        std::memcpy(&eight, x + k, static_cast<size_t>(std::min<int64_t>(8, m.columns - k)));
        while (eight) {
            const int byte = __builtin_ctzll(eight) / 8;
            eight &= ~(uint64_t{0xff} << 8 * byte);
            add(k + byte);
        }
    }
}

void run(const q4_matrix& m, const q4_spikes& s, const Kernels& kernels) {
    const Layout at(m);
    const SpikeKernel kernel = kernels.spikes(m);
    for (int64_t first = 0, last = 0; first < s.rows; first = last) {
        t_spikes.clear(), t_starts.clear();
        while (last < s.rows && static_cast<int64_t>(t_spikes.size()) < kBatchSpikes) add_row(m, at, s.x + last++ * s.x_stride, s.order);
        t_starts.push_back(static_cast<int64_t>(t_spikes.size()));
        const Spike* spikes = t_spikes.data();  // the caller's own: threads have others
        const int64_t* starts = t_starts.data();
        const int64_t work = at.tiles * (starts[last - first] + last - first);
        parallel(at.tiles, work < kThreadWork ? 1 : s.threads, [&](int64_t from, int64_t to, int) {
            alignas(64) float sums[kTileRows];
            for (int64_t t = from; t < to; ++t) {
                const Tile tile{m, at, s.tiles + t * at.tile_bytes};
                const int64_t before = t * kTileRows;
                Finish f{};
                f.step = 1.0f;
                f.is_global_per_row = s.global_count > 1;
                f.global = s.global_scale && f.is_global_per_row ? s.global_scale + before : s.global_scale;
                f.divides = s.global_divides != 0;
                f.bias = s.bias ? s.bias + before : nullptr;
                f.type = Q4_F32;
                f.count = std::min<int64_t>(kTileRows, m.rows - before);
                for (int64_t row = 0; row < last - first; ++row) {
                    kernel(tile, spikes + starts[row], starts[row + 1] - starts[row], sums);
                    f.y = s.y + (first + row) * s.y_stride + before;
                    kernels.finish(f, sums, 1);
                }
            }
        });
    }
}

}  // namespace
}  // namespace q4

extern "C" int32_t q4_cpu_spikes(const q4_matrix* matrix, const q4_spikes* spikes, int32_t isa) {
    if (!q4::is_sound(matrix) || !q4::is_sound(*matrix, spikes) || q4_cpu_has_isa(isa) != 1) return -1;
    q4::watch_forks();
    try {
        q4::run(*matrix, *spikes, *q4::kernels_of(isa));
    } catch (...) {  // no memory for scratch; nothing may be thrown across the C ABI
        return -2;
    }
    return 0;
}
