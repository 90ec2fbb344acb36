// The kernels, one body for all instruction sets: V is a vector type of vector_*.hpp.
//
//   y[m, r] = sum_k x[m, k] * w[r, k]      for the 16 rows r of one tile and up to V::kMostRows rows m of x
//
// exact   float32 activations, codes decoded exactly; a block's partial sum is scaled once.
// a8      activations in int8 with a scale for each 32 in-features, int32 dot products of a chunk, scaled in float32.
//
// Bound by reading the tile once: with one row of x, 0.27 bytes a cycle and lane; activations come from L1.
#pragma once

#include <cstdint>

#include "layout.hpp"

namespace q4 {

// Activations of one pass, chunk by chunk, rows of x side by side, so that one pointer walks through them.
struct Activations {
    const float* values;   // exact: [chunks][rows][32]
    const int8_t* levels;  // a8:    [chunks][rows][32]
    const float* scale;    // a8:    [chunks][rows]
    const float* sums;     // a8:    [chunks][rows][2], the sum of each half chunk's levels: whole numbers
};

struct Tile {
    const q4_matrix& matrix;
    const Layout& at;
    const uint8_t* data;
};

// Codes are prefetched this far ahead: nearer, the loads of one thread wait (2 KB: 27 of 36 GB/s; 8 KB: 34).
constexpr int kAhead = 4096;

template <class V> typename V::Floats numbers(int32_t type, const uint8_t* p) {
    switch (type) {
    case Q4_F32: return V::f32(p);
    case Q4_F16: return V::f16(p);
    case Q4_BF16: return V::bf16(p);
    case Q4_E4M3: return V::e4m3(p);
    case Q4_E8M0: return V::e8m0(p);
    case Q4_U8: return V::u8(p);
    case Q4_I8: return V::i8(p);
    default: return V::i32(p);
    }
}

static inline void prefetch(const uint8_t* p, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + kAhead + line);
}

// -- w4a8

template <class V, int Rows, int Second, bool Bytes, bool Narrow, bool Halves>
void a8_tile(const Tile& t, const Activations& x, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    using F = typename V::Floats;
    const q4_matrix& m = t.matrix;
    const Layout& at = t.at;
    // What V takes off levels that its dot products could not hold; the centre is lower by as much.
    constexpr int kShift = Narrow ? 0 : V::kShift;
    uint8_t level[16];
    for (int i = 0; i < 16; ++i) level[i] = static_cast<uint8_t>(m.level[i] - kShift);
    const typename V::Levels table(level);
    const F center = V::splat((Bytes ? 128.0f : m.center) - kShift);
    F sum[Rows][kParts];
    for (auto& row : sum)
        for (F& part : row) part = V::zero();
    int64_t chunk = 0;
    for (int64_t g = 0; g < at.groups; ++g) {
        const uint8_t* head = t.data + at.group_offset(g);
        prefetch(head, at.head_bytes);
        const uint8_t* data = head + at.head_bytes;
        for (const int64_t last = std::min(at.chunks, chunk + at.group_chunks); chunk < last;
             ++chunk, data += at.chunk_bytes) {
            prefetch(data, at.chunk_bytes);
            const int8_t* levels = x.levels + chunk * Rows * kChunk;
            const float* scale = x.scale + chunk * Rows;
            const float* sums = x.sums + chunk * Rows * 2;
            for (int part = 0; part < kParts; ++part) {
                typename V::template Dots<Rows> dots;
                for (int half = 0; half < 2; ++half) {
                    for (int l = 0; l < 2; ++l) {  // eight in-features at a time
                        const uint8_t* from = data + (half * 2 + l) * (Bytes ? 128 : 64) + part * V::kLanes * 4;
                        const int8_t* eight = levels + half * 16 + l * 8;
                        const auto line = V::line(from);
                        if constexpr (Bytes)
                            dots.template add<false>(V::byte_levels(line), V::byte_levels(V::line(from + 64)), eight);
                        else
                            dots.template add<Narrow>(table.low(line), table.high(line), eight);
                    }
                    dots.template half<Narrow>();
                    if (!Halves && half == 0) continue;
                    const int set = Halves ? half : 0;
                    const uint8_t* lane = head + part * V::kLanes * at.scale_size;
                    const F s = numbers<V>(m.scale_type, lane + at.scale_offset(set, 0));
                    F z = V::zero();
                    if constexpr (Second != Q4_NONE)
                        z = numbers<V>(m.second_type,
                                       head + at.second_offset(set, 0) + part * V::kLanes * at.second_size);
                    for (int r = 0; r < Rows; ++r) {
                        // Whole numbers below 2^24 as long as centre and zero are: nothing is rounded before the scale.
                        const F sum_x = V::splat(Halves ? sums[2 * r + half] : sums[2 * r] + sums[2 * r + 1]);
                        const F centred = V::fnma(Second == Q4_ZERO ? z : center, sum_x, dots.floats(r));
                        sum[r][part] = V::fma(s, V::mul(centred, V::splat(scale[r])), sum[r][part]);
                        if constexpr (Second == Q4_OFFSET)
                            sum[r][part] = V::fma(z, V::mul(sum_x, V::splat(scale[r])), sum[r][part]);
                    }
                    if constexpr (Halves) dots = {};
                }
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int part = 0; part < kParts; ++part) V::store(y + r * kTileRows + part * V::kLanes, sum[r][part]);
}

// -- exact

template <class V, int Rows, int Second, bool Bytes, class Book>
inline void exact_line(typename V::Ints line, const Book& book, typename V::Floats s,
                       typename V::Floats z, const float* x, typename V::Floats (&sum)[Rows]) {
    const auto add = [&](typename V::Floats w, int k) {
        if constexpr (Second == Q4_ZERO) w = V::sub(w, z);
        if constexpr (Second == Q4_OFFSET) w = V::fma(s, w, z);  // rounded once, as an exact weight is
        for (int r = 0; r < Rows; ++r) sum[r] = V::fma(w, V::splat(x[r * kChunk + k]), sum[r]);
    };
    if constexpr (Bytes) {
        add(V::template signed_byte<0>(line), 0);
        add(V::template signed_byte<1>(line), 1);
        add(V::template signed_byte<2>(line), 2);
        add(V::template signed_byte<3>(line), 3);
    } else {
        add(book.template at<0>(line), 0);
        add(book.template at<2>(line), 1);
        add(book.template at<4>(line), 2);
        add(book.template at<6>(line), 3);
        add(book.template at<1>(line), 4);
        add(book.template at<3>(line), 5);
        add(book.template at<5>(line), 6);
        add(book.template at<7>(line), 7);
    }
}

template <class V, int Rows, int Second, bool Bytes, class Book>
void exact_tile(const Tile& t, const Activations& x, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    using F = typename V::Floats;
    const q4_matrix& m = t.matrix;
    const Layout& at = t.at;
    const Book book(m.codebook);
    const bool halves = at.sets == 2;
    F sum[kParts][Rows];
    for (auto& part : sum)
        for (F& row : part) row = V::zero();
    int64_t chunk = 0;
    for (int64_t g = 0; g < at.groups; ++g) {
        const uint8_t* head = t.data + at.group_offset(g);
        prefetch(head, at.head_bytes);
        const uint8_t* data = head + at.head_bytes;
        for (const int64_t last = std::min(at.chunks, chunk + at.group_chunks); chunk < last;
             ++chunk, data += at.chunk_bytes) {
            prefetch(data, at.chunk_bytes);
            const float* values = x.values + chunk * Rows * kChunk;
            for (int part = 0; part < kParts; ++part) {
                F partial[Rows];
                for (F& row : partial) row = V::zero();
                for (int half = 0; half < 2; ++half) {
                    const int set = halves ? half : 0;
                    // A unit is a power of two, and 1 wherever there is a second number.
                    const F s = V::mul(numbers<V>(m.scale_type, head + at.scale_offset(set, 0) +
                                                                    part * V::kLanes * at.scale_size),
                                       V::splat(Bytes ? 1.0f : book.unit));
                    F z = V::zero();
                    if constexpr (Second != Q4_NONE)
                        z = numbers<V>(m.second_type,
                                       head + at.second_offset(set, 0) + part * V::kLanes * at.second_size);
                    constexpr int kLines = Bytes ? 4 : 2, kStep = Bytes ? 4 : 8;
                    for (int l = 0; l < kLines; ++l)
                        exact_line<V, Rows, Second, Bytes, Book>(
                            V::line(data + (half * kLines + l) * 64 + part * V::kLanes * 4), book, s, z,
                            values + half * 16 + l * kStep, partial);
                    // Each half is a chain of sums of its own: longer ones leave the units waiting for one another.
                    for (int r = 0; r < Rows; ++r) {
                        sum[part][r] = V::fma(Second == Q4_OFFSET ? V::splat(1.0f) : s, partial[r], sum[part][r]);
                        partial[r] = V::zero();
                    }
                }
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int part = 0; part < kParts; ++part) V::store(y + r * kTileRows + part * V::kLanes, sum[part][r]);
}

// -- which instantiation

using TileKernel = void (*)(const Tile&, const Activations&, float*);

template <class V, int Rows, int Second> TileKernel pick(const q4_matrix& m, int32_t family, bool narrow) {
    if (family == Q4_EXACT) {
        if (m.bits == 8) return exact_tile<V, Rows, Second, true, typename V::Codebook>;
        if (whole_unit(m.codebook) > 0.0f) return exact_tile<V, Rows, Second, false, typename V::WholeBook>;
        return exact_tile<V, Rows, Second, false, typename V::Codebook>;
    }
    const bool halves = m.block == 16;
    if (m.bits == 8) return halves ? a8_tile<V, Rows, Second, true, false, true> : a8_tile<V, Rows, Second, true, false, false>;
    if (narrow) return halves ? a8_tile<V, Rows, Second, false, true, true> : a8_tile<V, Rows, Second, false, true, false>;
    return halves ? a8_tile<V, Rows, Second, false, false, true> : a8_tile<V, Rows, Second, false, false, false>;
}

template <class V, int Rows> TileKernel pick(const q4_matrix& m, int32_t family) {
    bool narrow = true;  // sums of four products of a pair stay in 16 bits
    for (const uint8_t level : m.level) narrow = narrow && level <= 24;
    if (m.second == Q4_OFFSET) return pick<V, Rows, Q4_OFFSET>(m, family, narrow);
    if (m.second == Q4_ZERO) return pick<V, Rows, Q4_ZERO>(m, family, narrow);
    return pick<V, Rows, Q4_NONE>(m, family, narrow);
}

// The kernel for that many rows of x, a power of two up to V::kMostRows.
template <class V> TileKernel kernel_for(const q4_matrix& m, int32_t family, int rows) {
    if constexpr (V::kMostRows >= 8)
        if (rows == 8) return pick<V, 8>(m, family);
    if (rows == 4) return pick<V, 4>(m, family);
    if (rows == 2) return pick<V, 2>(m, family);
    return pick<V, 1>(m, family);
}

struct Kernels {
    TileKernel (*tile)(const q4_matrix&, int32_t family, int rows);
    int most_rows;
    // Quantise 32 in-features of one row: returns the scale; levels, and the sums of both halves' levels.
    float (*quantize)(const float* x, int8_t* levels, float* sums);
};

// Those of an instruction set that was compiled in, or NULL; see isa.cpp.
const Kernels* kernels_of(int32_t isa);
const Kernels& kernels_avx2();
const Kernels& kernels_avxvnni();
const Kernels& kernels_avx512();
const Kernels& kernels_neon_dotprod();
const Kernels& kernels_neon_i8mm();

}  // namespace q4
