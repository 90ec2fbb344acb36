// The parts of y = x wᵀ that calls and programs share: rows of x to the kernels' order, and tiles of w times these. Nothing
// here takes memory, and a row of y has the same bits whichever rows and tiles are computed next to it.
#pragma once

#include <type_traits>

#include "kernel.hpp"

namespace q4 {

struct Pass {
    int64_t first;
    int rows;
    DirectKernel direct;  // one of the two, which serves this many rows
    PanelKernel panel;
};

// What scratch is made of.
struct alignas(64) Line {
    uint8_t bytes[64];
};

// Rows of x as the kernels read them.
struct Rows {
    float* values = nullptr;
    int8_t* levels = nullptr;
    float* scale = nullptr;
    int32_t* start = nullptr;
    float* side = nullptr;
    int64_t chunk_bytes = kChunk;  // of levels
    Outlier* outliers = nullptr;       // [rows][most_outliers]
    int32_t* outlier_count = nullptr;  // [rows]

    Rows() = default;
    // In memory of that many bytes, from a multiple of 64 on.
    Rows(const Layout& at, int32_t family, int64_t count, uint8_t* memory) { place(at, family, count, memory); }
    // Of one row: with more it costs as much as the exact kernel, which then computes it.
    static int64_t most_outliers(const Layout& at) { return 2 * at.chunks + kChunk / 4; }
    static int64_t bytes(const Layout& at, int32_t family, int64_t count) { return Rows().place(at, family, count, nullptr); }

    bool has_outliers(int64_t row) const { return outlier_count && outlier_count[row]; }
    // How many rows have outliers.
    int64_t count_outliers(int64_t count) const {
        int64_t found = 0;
        for (int64_t row = 0; row < count; ++row) found += has_outliers(row);
        return found;
    }

    // The given chunk on of the pass whose rows begin at `first`.
    Activations from(const Layout& at, const Pass& pass, int64_t chunk) const {
        const int64_t place = pass.first * at.chunks + chunk * pass.rows;
        if (values) return {values + place * kChunk, nullptr, nullptr, nullptr, nullptr};
        return {nullptr, levels + place * chunk_bytes, scale + place, start + place * 2, side + place * 2};
    }

  private:
    int64_t place(const Layout& at, int32_t family, int64_t count, uint8_t* memory) {
        const int64_t places = count * at.chunks;
        auto address = reinterpret_cast<uintptr_t>(memory);
        const uintptr_t begin = address;
        const auto take = [&](auto*& part, int64_t items) {
            part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(address);
            address += static_cast<uintptr_t>(ceil_div(items * static_cast<int64_t>(sizeof *part), 64) * 64);
        };
        if (family == Q4_EXACT) {
            take(values, places * kChunk);
            return static_cast<int64_t>(address - begin);
        }
        if (family == Q4_A16) chunk_bytes *= 2;
        take(levels, places * chunk_bytes);
        take(scale, places);
        take(start, places * 2);
        take(side, places * 2);
        take(outliers, count * most_outliers(at));
        take(outlier_count, count);
        return static_cast<int64_t>(address - begin);
    }
};

// Rows of x in one batch: what scratch holds of them, and of each thread's sums, in whole passes.
int64_t batch_rows(const Layout& at, int most, int threads);

// Rows in passes: of the family's own number as long as they last, then of powers of two. Calls add(pass).
template <class Add>
void each_pass(const q4_matrix& m, int32_t family, const Kernels& kernels, int64_t count, bool has_panels, const Add& add) {
    const int power = kernels.direct_rows, most = has_panels ? kernels.panel_rows[family] : power;
    for (int64_t row = 0; row < count;) {
        int rows = most;
        if (rows > count - row)
            for (rows = power; rows > count - row;) rows /= 2;
        add(Pass{row, rows, has_panels ? nullptr : kernels.direct(m, family, rows),
                 has_panels ? kernels.panel(m, family, rows) : nullptr});
        row += rows;
    }
}

// Some rows of x times a matrix.
struct Product {
    const q4_matrix& m;
    const Layout& at;
    const q4_call& c;
    const Kernels& kernels;
    const Pass* passes;
    int64_t pass_count, count;  // count: of rows
    bool has_panels;
    const int64_t* index;  // which rows of x and y: [count]
    Rows rows;
    uint8_t* odd;          // [count], written by lay_out: whether int8 or int16 can't hold the row, or it is shrunk (exact)

    void lay_out(int64_t first_pass, int64_t last_pass) const;
    // After all passes are laid out. Where it has panels, with one and with sums [count][16] of the thread's own.
    void tiles(int64_t first, int64_t last, Panel* panel, float* sums) const;
};

}  // namespace q4
