// Where everything lies in a prepared weight; see q4_cpu.h for the picture.
#pragma once

#include <algorithm>
#include <cstdint>

#include "q4_cpu.h"

namespace q4 {
// This is compiled for several instruction sets, and no copy may stand in for another: functions are static or inlined.

constexpr int kTileRows = Q4_TILE_ROWS;
constexpr int kChunk = Q4_CHUNK;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int size_of(int32_t type) {
    switch (type) {
    case Q4_F32:
    case Q4_I32: return 4;
    case Q4_BF16:
    case Q4_F16: return 2;
    default: return 1;
    }
}

struct Layout {
    int64_t chunks;         // of 32 in-features, in a row
    int64_t group_chunks;   // chunks that share one set of numbers
    int64_t groups;
    int sets;               // scales per group and row: 2 where a block is 16, else 1
    int scale_size, second_size;
    int64_t chunk_bytes;    // codes of 16 rows
    int64_t head_bytes;     // numbers of 16 rows at the start of a group
    int64_t super_groups;   // groups that share a super-block's numbers; 0 without
    int64_t supers;         // in a row
    int64_t super_bytes;    // numbers of one, of 16 rows
    int64_t tile_bytes, tiles;

    [[gnu::always_inline]] explicit Layout(const q4_matrix& m)
        : chunks(ceil_div(m.columns, kChunk)), group_chunks(std::max<int64_t>(1, m.block / kChunk)),
          groups(ceil_div(chunks, group_chunks)), sets(m.block == 16 ? 2 : 1), scale_size(size_of(m.scale_type)),
          second_size(m.second == Q4_NONE ? 0 : size_of(m.second_type)), chunk_bytes(kTileRows * kChunk * m.bits / 8),
          head_bytes(int64_t{kTileRows} * sets * (scale_size + second_size)), super_groups(m.super_blocks / sets),
          supers(super_groups ? groups / super_groups : 0), super_bytes(int64_t{kTileRows} * 2 * (m.second == Q4_NONE ? 1 : 2)),
          tile_bytes(supers * super_bytes + groups * head_bytes + chunks * chunk_bytes), tiles(ceil_div(m.rows, kTileRows)) {}

    [[gnu::always_inline]] int64_t group_offset(int64_t group) const {
        return supers * super_bytes + group * (head_bytes + group_chunks * chunk_bytes);
    }
    [[gnu::always_inline]] int64_t super_offset(int64_t group) const { return supers ? group / super_groups * super_bytes : 0; }
    [[gnu::always_inline]] int64_t scale_offset(int set, int row) const { return (int64_t{set} * kTileRows + row) * scale_size; }
    [[gnu::always_inline]] int64_t second_offset(int set, int row) const {
        return int64_t{sets} * kTileRows * scale_size + (int64_t{set} * kTileRows + row) * second_size;
    }
};

// Where the numbers of a column lie in each tile: its group and super-block, the line of its codes and the bits before its own.
struct Place {
    int64_t head, super, codes;
    int32_t shift, set;
};

static inline Place place_of(const q4_matrix& m, const Layout& at, int64_t column) {
    const bool is_bytes = m.bits == 8;
    const int64_t chunk = column / kChunk, inside = column % kChunk, step = is_bytes ? 4 : 8;
    const int64_t in_line = inside % step;
    Place place{};
    place.head = at.group_offset(chunk / at.group_chunks), place.super = at.super_offset(chunk / at.group_chunks);
    place.codes = place.head + at.head_bytes + chunk % at.group_chunks * at.chunk_bytes + inside / step * 64;
    place.shift = static_cast<int32_t>(is_bytes ? 8 * in_line : in_line % 4 * 8 + in_line / 4 * 4);
    place.set = at.sets == 2 ? static_cast<int32_t>(inside / 16) : 0;
    return place;
}

// The largest of 1 and 1/2 of which all values are whole multiples within a signed byte; 0 where neither is.
static inline float whole_unit(const float* table) {
    for (const float unit : {1.0f, 0.5f}) {
        bool whole = true;
        for (int i = 0; i < 16; ++i) {
            const float level = table[i] / unit;
            whole = whole && level >= -127.0f && level <= 127.0f && level == static_cast<float>(static_cast<int>(level));
        }
        if (whole) return unit;
    }
    return 0.0f;
}

// Levels above this are wide: AVX2 multiplies them as signed numbers, which they become less 128.
constexpr int kNarrowLevel = 24;
static inline bool has_wide_levels(const q4_matrix& m) {
    return m.bits == 8 || *std::max_element(m.level, m.level + 16) > kNarrowLevel;
}

// Bytes whose levels are 64 in a row, or fewer: those of 5 and 6 bits. AVX2 multiplies them as unsigned numbers above the first.
constexpr int kShortRange = 63;
static inline bool has_short_bytes(const q4_matrix& m) {
    return m.bits == 8 && m.level[1] && m.level[1] >= m.level[0] && m.level[1] - m.level[0] <= kShortRange;
}

// What a byte of a tile lacks to the value of its 8-bit code.
static inline float byte_base(const q4_matrix& m) { return 128.0f - m.center; }

// Whether int16 activations meet the words of a table of their own; elsewhere they meet levels, less a centre.
static inline bool has_words(const q4_matrix& m) { return m.bits == 4 && m.second == Q4_NONE && has_wide_levels(m); }

// The largest level of int16 activations. 16 in-features of 8191 * 16383 fit 31 bits, as do 32 of 255 * 32766; both levels
// are multiples of 16383 = 127 * 129, so that what int8 holds without loss, int16 does.
constexpr int kMostWord = 8191, kShortWord = 4095;
static inline bool is_sound_word(int word) { return word >= -kMostWord && word <= kMostWord; }
static inline float word_peak(const q4_matrix& m) {
    if (!has_words(m)) return 32766.0f;
    const auto [least, most] = std::minmax_element(m.word, m.word + 16);
    return std::max(-*least, +*most) > kShortWord ? 16383.0f : 32766.0f;
}

}  // namespace q4
