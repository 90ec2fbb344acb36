// One call of the sparse product: where each spike's numbers lie, then tiles over threads.
#include <vector>

#include "checks.hpp"
#include "product.hpp"
#include "threads.hpp"

namespace q4 {
namespace {

// Below this many spikes times tiles, a second thread costs more than it brings.
constexpr int64_t kThreadWork = 32 * 1024;
// Spikes of one batch of rows; a row has at most one for each in-feature.
constexpr int64_t kBatchSpikes = 1 << 16;
thread_local std::vector<Spike> t_spikes;

// The number of the first spike that is out of range or does not rise within its row, plus 1; 0 where all are sound.
int64_t first_wrong(const q4_matrix& m, const q4_spikes& s) {
    for (int64_t row = 0; row < s.rows; ++row)
        for (int64_t i = s.starts[row]; i < s.starts[row + 1]; ++i) {
            const int64_t least = i == s.starts[row] ? 0 : s.columns[i - 1] + 1;
            if (s.columns[i] < least || s.columns[i] >= m.columns) return i + 1;
        }
    return 0;
}

Spike place(const q4_matrix& m, const Layout& at, int64_t column) {
    const bool is_bytes = m.bits == 8;
    const int64_t chunk = column / kChunk, inside = column % kChunk, step = is_bytes ? 4 : 8;
    const int64_t in_line = inside % step;
    Spike spike{};
    spike.head = at.group_offset(chunk / at.group_chunks);
    spike.codes = spike.head + at.head_bytes + chunk % at.group_chunks * at.chunk_bytes + inside / step * 64;
    spike.shift = static_cast<int32_t>(is_bytes ? 8 * in_line : in_line % 4 * 8 + in_line / 4 * 4);
    spike.set = at.sets == 2 ? static_cast<int32_t>(inside / 16) : 0;
    return spike;
}

void lay_out(const q4_matrix& m, const Layout& at, const q4_spikes& s, int64_t first_row, int64_t last_row) {
    t_spikes.clear();
    for (int64_t row = first_row; row < last_row; ++row)
        for (int64_t i = s.starts[row]; i < s.starts[row + 1]; ++i) {
            Spike spike = place(m, at, s.columns[i]);
            const int64_t half = s.columns[i] / 16;
            spike.keep = i > s.starts[row] && s.columns[i - 1] / 16 == half ? 1.0f : 0.0f;
            spike.ends = i + 1 < s.starts[row + 1] && s.columns[i + 1] / 16 == half ? 0.0f : 1.0f;
            t_spikes.push_back(spike);
        }
}

void run(const q4_matrix& m, const q4_spikes& s, const Kernels& kernels) {
    const Layout at(m);
    const SpikeKernel kernel = kernels.spikes(m);
    for (int64_t first = 0, last; first < s.rows; first = last) {
        for (last = first + 1; last < s.rows && s.starts[last + 1] - s.starts[first] <= kBatchSpikes;) ++last;
        lay_out(m, at, s, first, last);
        const Spike* spikes = t_spikes.data();  // the caller's own: threads have others
        const int64_t work = at.tiles * (s.starts[last] - s.starts[first] + last - first);
        parallel(at.tiles, work < kThreadWork ? 1 : s.threads, [&](int64_t from, int64_t to, int) {
            alignas(64) float sums[kTileRows];
            for (int64_t t = from; t < to; ++t)
                for (int64_t row = first; row < last; ++row) {
                    const int64_t begin = s.starts[row] - s.starts[first], rows_before = t * kTileRows;
                    kernel(Tile{m, at, s.tiles + t * at.tile_bytes}, spikes + begin, s.starts[row + 1] - s.starts[row], sums);
                    Finish f{};
                    f.step = f.growth = 1.0f;
                    f.is_global_per_row = s.global_count > 1;
                    f.global = s.global_scale && f.is_global_per_row ? s.global_scale + rows_before : s.global_scale;
                    f.divides = s.global_divides != 0;
                    f.bias = s.bias ? s.bias + rows_before : nullptr;
                    f.y = s.y + row * s.y_stride + rows_before;
                    f.type = Q4_F32;
                    f.count = std::min<int64_t>(kTileRows, m.rows - rows_before);
                    kernels.finish(f, sums);
                }
        });
    }
}

}  // namespace
}  // namespace q4

extern "C" int64_t q4_cpu_spikes(const q4_matrix* matrix, const q4_spikes* spikes, int32_t isa) {
    if (!q4::is_sound(matrix) || !q4::is_sound(*matrix, spikes) || q4_cpu_has_isa(isa) != 1) return -1;
    if (const int64_t wrong = q4::first_wrong(*matrix, *spikes)) return wrong;
    q4::watch_forks();
    try {
        q4::run(*matrix, *spikes, *q4::kernels_of(isa));
    } catch (...) {  // no memory for scratch; nothing may be thrown across the C ABI
        return -2;
    }
    return 0;
}
