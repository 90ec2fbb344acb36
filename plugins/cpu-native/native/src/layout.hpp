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

// Bits [from, from + bits) of each byte of a line are bits [to, to + bits) of a code.
struct Field {
    int line, from, bits, to;
    constexpr int mask() const { return (1 << bits) - 1; }
};
struct Fields {
    int count;
    Field field[3];
};

// Where four in-features of a chunk, 4 step … + 3, lie in its lines: byte 4 r + i is that of row r and of the i-th of them.
// Whole bytes, nibbles or pairs of bits as far as they go; in what these leave of their bytes, bits of the others.
[[gnu::always_inline]] static inline constexpr Fields fields_of(int bits, int step) {
    const int half = step / 4 * 3;
    switch (bits) {
    case 2: return {1, {{step / 4, step % 4 * 2, 2, 0}}};
    case 3:
        if (step == 6) return {2, {{0, 6, 2, 0}, {2, 6, 1, 2}}};
        if (step == 7) return {2, {{1, 6, 2, 0}, {2, 7, 1, 2}}};
        return {1, {{step / 2, step % 2 * 3, 3, 0}}};
    case 4: return {1, {{step / 2, step % 2 * 4, 4, 0}}};
    case 5:
        if (step == 5) return {2, {{0, 5, 3, 0}, {1, 5, 2, 3}}};
        if (step == 6) return {2, {{2, 5, 3, 0}, {3, 5, 2, 3}}};
        if (step == 7) return {3, {{4, 5, 3, 0}, {1, 7, 1, 3}, {3, 7, 1, 4}}};
        return {1, {{step, 0, 5, 0}}};
    case 6:
        if (step % 4 == 3) return {3, {{half, 6, 2, 0}, {half + 1, 6, 2, 2}, {half + 2, 6, 2, 4}}};
        return {1, {{half + step % 4, 0, 6, 0}}};
    default: return {1, {{step, 0, 8, 0}}};
    }
}

// In-feature j of row r of a chunk, as it is held.
static inline int held_code(int bits, const uint8_t* codes, int r, int j) {
    const Fields of = fields_of(bits, j / 4);
    int code = 0;
    for (int i = 0; i < of.count; ++i) {
        const Field& f = of.field[i];
        code |= (codes[f.line * 64 + r * 4 + j % 4] >> f.from & f.mask()) << f.to;
    }
    return code;
}
static inline void hold_code(int bits, int code, uint8_t* codes, int r, int j) {
    const Fields of = fields_of(bits, j / 4);
    for (int i = 0; i < of.count; ++i) {
        const Field& f = of.field[i];
        codes[f.line * 64 + r * 4 + j % 4] |= static_cast<uint8_t>((code >> f.to & f.mask()) << f.from);
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
          second_size(m.second == Q4_NONE || m.second_type == Q4_HIGH_U4 ? 0 : size_of(m.second_type)),
          chunk_bytes(kTileRows * kChunk * m.held_bits / 8),
          head_bytes(int64_t{kTileRows} * sets * (scale_size + second_size)), super_groups(m.super_blocks / sets),
          supers(super_groups ? groups / super_groups : 0), super_bytes(int64_t{kTileRows} * 2 * (m.second == Q4_NONE ? 1 : 2)),
          tile_bytes(supers * super_bytes + groups * head_bytes + chunks * chunk_bytes), tiles(ceil_div(m.rows, kTileRows)) {}

    [[gnu::always_inline]] int64_t group_offset(int64_t group) const {
        return supers * super_bytes + group * (head_bytes + group_chunks * chunk_bytes);
    }
    [[gnu::always_inline]] int64_t super_offset(int64_t group) const { return supers ? group / super_groups * super_bytes : 0; }
    [[gnu::always_inline]] int64_t scale_offset(int set, int row) const { return (int64_t{set} * kTileRows + row) * scale_size; }
    [[gnu::always_inline]] int64_t second_offset(int set, int row) const {
        if (!second_size) return scale_offset(set, row);  // the other half of its byte
        return int64_t{sets} * kTileRows * scale_size + (int64_t{set} * kTileRows + row) * second_size;
    }
};

// Where the numbers of a column lie in each tile: its group and super-block, the line of its codes and the bits before its own.
// Held bits may lie in several lines: `step` says in which of the chunk's.
struct Place {
    int64_t head, super, codes;
    int32_t shift, set, step;
};

static inline Place place_of(const q4_matrix& m, const Layout& at, int64_t column) {
    const int64_t chunk = column / kChunk;
    const auto inside = static_cast<int32_t>(column % kChunk);
    Place place{};
    place.step = inside / 4;
    const Field first = fields_of(m.held_bits, place.step).field[0];
    place.head = at.group_offset(chunk / at.group_chunks), place.super = at.super_offset(chunk / at.group_chunks);
    place.codes = place.head + at.head_bytes + chunk % at.group_chunks * at.chunk_bytes + first.line * 64;
    place.shift = inside % 4 * 8 + first.from;
    place.set = at.sets == 2 ? inside / 16 : 0;
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

// Whether codes are held in fewer bits than the source's: as how much their level is above the first one.
static inline bool is_held_short(const q4_matrix& m) { return m.held_bits != m.bits; }

// The value of a code less that of its byte: of a tile's 8-bit code, or of what the exact kernels make of a short one.
static inline float byte_base(const q4_matrix& m) { return m.bits == 8 ? 128.0f - m.center : 0.0f; }
// What a code that is held short lacks to its byte.
static inline int short_base(const q4_matrix& m) { return m.first - (m.bits == 8 ? 128 : static_cast<int>(m.center)); }

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
