// Which arguments make sense. The rest is refused before anything is read or written.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "layout.hpp"

namespace q4 {

// Sizes beyond this are mistakes, and their products might not fit 64 bits.
constexpr int64_t kMostSize = int64_t{1} << 30;

inline bool is_size(int64_t value) { return value >= 1 && value <= kMostSize; }

inline bool is_number_type(int32_t type) { return type >= Q4_F32 && type <= Q4_I32; }

inline bool is_activation_type(int32_t type) { return type == Q4_F32 || type == Q4_BF16 || type == Q4_F16; }

inline bool is_aligned(const void* address, int32_t type) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(size_of(type)) == 0;
}

inline bool is_family(int32_t family) { return family >= Q4_EXACT && family <= Q4_A16; }

inline bool has_sound_levels(const q4_matrix& m) {
    const bool is_whole = m.center >= 0.0f && m.center <= 255.0f && m.center == static_cast<float>(static_cast<int>(m.center));
    if (m.bits == 8) return m.second == Q4_NONE ? m.center == 128.0f : is_whole;
    if (has_words(m) && !std::all_of(m.word, m.word + 16, is_sound_word)) return false;
    if (has_wide_levels(m)) return m.center == 128.0f && *std::min_element(m.level, m.level + 16) > 0;
    return is_whole;
}

inline bool is_byte_type(int32_t type) { return type == Q4_U8 || type == Q4_I8; }

// Two halves of bytes, for a scale and an offset of a block in a super-block.
inline bool are_halves(const q4_matrix& m) {
    return m.scale_type == Q4_LOW_U4 && m.second == Q4_OFFSET && m.second_type == Q4_HIGH_U4 && m.super_blocks;
}

// Whether fewer bits of a code are held, where that may be.
inline bool has_sound_bits(const q4_matrix& m) {
    if (!is_held_short(m)) return m.first == 0;
    const bool is_known = m.bits == 4 ? m.held_bits == 2 || m.held_bits == 3 : m.held_bits == 5 || m.held_bits == 6;
    if (!is_known || m.second == Q4_ZERO || m.first < 0 || m.first + (1 << m.held_bits) > 1 << m.bits || m.step != 1.0f) return false;
    for (int q = 0; q < 16 && m.bits == 4; ++q)
        if (m.level[q] != q || m.center > 127.0f || m.codebook[q] != static_cast<float>(q) - m.center) return false;
    return true;
}

// Whether super-blocks are whole groups of bytes, and divide a row.
inline bool has_sound_super_blocks(const q4_matrix& m) {
    if (m.super_blocks == 0) return true;
    if (!are_halves(m) && (!is_byte_type(m.scale_type) || (m.second != Q4_NONE && !is_byte_type(m.second_type)))) return false;
    if (!is_size(m.super_blocks) || m.second == Q4_ZERO || (m.block == 16 && m.super_blocks % 2)) return false;
    return ceil_div(m.columns, m.block) % m.super_blocks == 0;
}

inline bool is_sound(const q4_matrix* matrix) {
    if (!matrix) return false;
    const q4_matrix& m = *matrix;
    if (!is_size(m.rows) || !is_size(m.columns) || !is_size(m.block) || (m.block != 16 && m.block % kChunk)) return false;
    if ((m.bits != 4 && m.bits != 8) || (!are_halves(m) && !is_number_type(m.scale_type))) return false;
    if (m.second != Q4_NONE && m.second != Q4_OFFSET && m.second != Q4_ZERO) return false;
    if (m.second != Q4_NONE && !are_halves(m) && !is_number_type(m.second_type)) return false;
    if ((m.second == Q4_OFFSET || m.bits == 8) && m.step != 1.0f) return false;
    if (m.is_unsigned && (m.is_unsigned != 1 || m.bits != 8)) return false;
    if (!has_sound_levels(m) || !has_sound_bits(m) || !has_sound_super_blocks(m)) return false;
    if (m.second == Q4_NONE || m.bits == 8) return true;
    for (int q = 0; q < 16; ++q)  // an offset is added to values as they are
        if (m.codebook[q] != static_cast<float>(m.level[q]) - m.center) return false;
    if (m.second != Q4_ZERO) return true;
    for (int q = 0; q < 16; ++q)
        if (m.level[q] != q || m.codebook[q] != static_cast<float>(q)) return false;
    return m.step == 1.0f;
}

inline bool is_sound(const q4_matrix& m, const q4_source* source) {
    if (!source) return false;
    const q4_source& s = *source;
    if (!s.codes || !s.scale || (m.second != Q4_NONE && !s.second) || s.group_bytes < 1) return false;
    if (m.super_blocks && (!s.super_scale || (m.second != Q4_NONE && !s.super_second))) return false;
    if (m.bits == 8) return s.order == Q4_BYTES;
    if (s.order == Q4_HALF_SPLIT) return is_size(s.half);
    return s.order == Q4_LOW_FIRST || s.order == Q4_HIGH_FIRST;
}

inline bool are_sound(const q4_matrix& m, const int64_t* rows, int64_t count) {
    if (count < 0) return false;
    if (!rows) return count <= m.rows;
    for (int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= m.rows) return false;
    return true;
}

inline bool is_order(const int64_t* order) { return reinterpret_cast<uintptr_t>(order) % alignof(int64_t) == 0; }

inline bool is_sound(const q4_inputs& inputs) {
    if (!is_order(inputs.order)) return false;
    return !inputs.factor || (is_activation_type(inputs.factor_type) && is_aligned(inputs.factor, inputs.factor_type));
}

inline bool is_sound(const q4_matrix& m, const q4_call* call) {
    if (!call) return false;
    const q4_call& c = *call;
    if (!c.tiles || !c.x || !c.y || c.threads < 1 || !is_size(c.x_rows)) return false;
    if (!is_activation_type(c.x_type) || !is_activation_type(c.y_type)) return false;
    if (!is_family(c.family) || !is_sound(c.inputs)) return false;
    if (c.global_scale && ((c.global_count != 1 && c.global_count != m.rows) || !is_aligned(c.global_scale, Q4_F32))) return false;
    if (!is_aligned(c.x, c.x_type) || !is_aligned(c.y, c.y_type) || !is_aligned(c.bias, c.y_type)) return false;
    return c.x_rows == 1 || c.y_stride >= m.rows || c.y_stride <= -m.rows;
}

inline bool is_sound(const q4_matrix& m, const q4_spikes* spikes) {
    if (!spikes) return false;
    const q4_spikes& s = *spikes;
    if (!s.tiles || !s.x || !s.y || s.threads < 1 || !is_size(s.rows) || !is_order(s.order)) return false;
    if (s.global_scale && ((s.global_count != 1 && s.global_count != m.rows) || !is_aligned(s.global_scale, Q4_F32))) return false;
    return is_aligned(s.y, Q4_F32) && is_aligned(s.bias, Q4_F32) && (s.rows == 1 || s.y_stride >= m.rows);
}

}  // namespace q4
