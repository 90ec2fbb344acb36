// Between a source's own order and tiles: one pass, each byte of the source read once.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstring>
#include <vector>

#include "checks.hpp"
#include "layout.hpp"
#include "threads.hpp"

namespace q4 {
namespace {

// Ask for huge pages before tiles are written: streaming them then costs a tenth less where addresses are translated twice, as
// in a virtual machine. Memory that an allocator gives out again has small pages already, which the second call joins, and
// not dropped: they may be pinned. A hint only: systems that don't know it, or have no such pages, ignore it.
void ask_for_huge_pages(uint8_t* tiles, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t kPage = 2 << 20;
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers don't name
    const auto begin = (reinterpret_cast<uintptr_t>(tiles) + kPage - 1) / kPage * kPage;
    const auto end = (reinterpret_cast<uintptr_t>(tiles) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
    if (begin >= end || madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) != 0) return;
    madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#else
    (void)tiles, (void)bytes;
#endif
}

// The codes of one row, one per byte, in the order of in-features.
void read_row(const q4_matrix& m, const q4_source& s, const uint8_t* row, uint8_t* bytes, uint8_t* codes) {
    const int64_t count = m.bits == 8 ? m.columns : s.order == Q4_HALF_SPLIT
                              ? ceil_div(m.columns, 2 * int64_t{s.half}) * s.half
                              : ceil_div(m.columns, 2);
    for (int64_t first = 0; first < count; first += s.group_bytes) {
        const uint8_t* group = row + first / s.group_bytes * s.code_group;
        const int64_t length = std::min(s.group_bytes, count - first);
        if (s.code_byte == 1)
            std::memcpy(bytes + first, group, static_cast<size_t>(length));
        else
            for (int64_t j = 0; j < length; ++j) bytes[first + j] = group[j * s.code_byte];
    }
    const uint8_t* in = bytes;
    switch (s.order) {
    case Q4_BYTES:
        for (int64_t j = 0; j < m.columns; ++j) codes[j] = static_cast<uint8_t>(in[j] ^ (m.is_unsigned ? 128 : 0));
        break;
    case Q4_LOW_FIRST:
        for (int64_t j = 0; j < count; ++j) codes[2 * j] = in[j] & 15, codes[2 * j + 1] = in[j] >> 4;
        break;
    case Q4_HIGH_FIRST:
        for (int64_t j = 0; j < count; ++j) codes[2 * j] = in[j] >> 4, codes[2 * j + 1] = in[j] & 15;
        break;
    default:
        for (int64_t first = 0; first < count; first += s.half, in += s.half, codes += 2 * s.half)
            for (int j = 0; j < s.half; ++j) codes[j] = in[j] & 15, codes[s.half + j] = in[j] >> 4;
    }
}

// Room for the codes of a row, in whole groups of HALF_SPLIT and whole chunks.
int64_t row_room(const Layout& at, const q4_source& s) { return at.chunks * kChunk + 2 * std::max<int64_t>(s.half, 1); }

void pack_tile(const q4_matrix& m, const Layout& at, const q4_source& s, int64_t tile, uint8_t* out, uint8_t* bytes,
               uint8_t* codes) {
    std::memset(out, 0, static_cast<size_t>(at.tile_bytes));
    const int64_t first = tile * kTileRows;
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, m.rows - first));
    const int64_t blocks = ceil_div(m.columns, m.block);
    for (int r = 0; r < rows; ++r) {
        read_row(m, s, s.codes + (first + r) * s.code_row, bytes, codes);
        std::fill(codes + m.columns, codes + at.chunks * kChunk, uint8_t{0});  // over the padding nibbles of the source
        for (int64_t i = 0, place = (first + r) * at.supers; i < at.supers; ++i, ++place) {
            uint8_t* super = out + i * at.super_bytes + 2 * r;
            std::memcpy(super, s.super_scale + place * s.super_scale_step, 2);
            if (m.second != Q4_NONE) std::memcpy(super + 2 * kTileRows, s.super_second + place * s.super_second_step, 2);
        }
        for (int64_t g = 0; g < at.groups; ++g) {
            uint8_t* group = out + at.group_offset(g);
            for (int set = 0; set < at.sets; ++set) {
                const int64_t b = g * at.sets + set;
                if (b >= blocks) continue;  // a short last group
                std::memcpy(group + at.scale_offset(set, r), s.scale + (first + r) * s.scale_row + b * s.scale_block,
                            static_cast<size_t>(at.scale_size));
                if (m.second == Q4_NONE) continue;
                const uint8_t* second = s.second + (first + r) * s.second_row + b * s.second_block;
                uint8_t* to = group + at.second_offset(set, r);
                if (at.second_size)
                    std::memcpy(to, second, static_cast<size_t>(at.second_size));
                else
                    *to = static_cast<uint8_t>((*to & 15) | *second << 4);
            }
            const int64_t last = std::min(at.chunks, (g + 1) * at.group_chunks);
            for (int64_t chunk = g * at.group_chunks; chunk < last; ++chunk) {
                const uint8_t* from = codes + chunk * kChunk;
                uint8_t* data = group + at.head_bytes + (chunk - g * at.group_chunks) * at.chunk_bytes + r * 4;
                if (is_held_short(m))
                    for (int j = 0; j < kChunk && chunk * kChunk + j < m.columns; ++j)
                        hold_code(m.held_bits, (m.bits == 8 ? from[j] ^ 128 : from[j]) - m.first, data - r * 4, r, j);
                else if (m.bits == 8)
                    for (int line = 0; line < 8; ++line) std::memcpy(data + 64 * line, from + 4 * line, 4);
                else
                    for (int line = 0; line < 4; ++line)
                        for (int i = 0; i < 4; ++i)
                            data[64 * line + i] = static_cast<uint8_t>(from[8 * line + i] | from[8 * line + 4 + i] << 4);
            }
        }
    }
}

// Waking threads costs more than moving this much.
constexpr int64_t kAloneBytes = 64 << 10;

int32_t team_for(const Layout& at, int64_t rows, int32_t threads) {
    return ceil_div(rows, kTileRows) * at.tile_bytes < kAloneBytes ? 1 : threads;
}

}  // namespace
}  // namespace q4

extern "C" int64_t q4_cpu_prepared_bytes(const q4_matrix* matrix) {
    if (!q4::is_sound(matrix)) return -1;
    const q4::Layout at(*matrix);
    return at.tiles * at.tile_bytes;
}

extern "C" int32_t q4_cpu_pack(const q4_matrix* matrix, const q4_source* source, uint8_t* tiles, int32_t threads) {
    if (!q4::is_sound(matrix) || !q4::is_sound(*matrix, source) || !tiles || threads < 1) return -1;
    const q4::Layout at(*matrix);
    threads = q4::team_for(at, matrix->rows, threads);
    q4::watch_forks();
    try {
        q4::ask_for_huge_pages(tiles, at.tiles * at.tile_bytes);
        // Taken here, because nothing may be thrown out of a thread.
        const int64_t room = q4::row_room(at, *source);
        std::vector<uint8_t> rows(static_cast<size_t>(q4::team_size(at.tiles, threads) * 2 * room));
        q4::parallel(at.tiles, threads, [&](int64_t from, int64_t to, int thread) {
            uint8_t* bytes = rows.data() + thread * 2 * room;
            for (int64_t tile = from; tile < to; ++tile)
                q4::pack_tile(*matrix, at, *source, tile, tiles + tile * at.tile_bytes, bytes, bytes + room);
        });
    } catch (...) {
        return -2;
    }
    return 0;
}

extern "C" int32_t q4_cpu_unpack(const q4_matrix* matrix, const uint8_t* tiles, const int64_t* rows, int64_t count,
                                 uint8_t* codes, uint8_t* scale, uint8_t* second, int32_t threads) {
    if (!q4::is_sound(matrix) || !q4::are_sound(*matrix, rows, count) || !tiles || threads < 1) return -1;
    if (count == 0) return 0;
    if (!codes || !scale || (matrix->second != Q4_NONE && !second)) return -1;
    const q4_matrix& m = *matrix;
    const q4::Layout at(m);
    const int64_t blocks = q4::ceil_div(m.columns, m.block);
    q4::watch_forks();
    const auto unpack = [&](int64_t from, int64_t to, int) {
        for (int64_t i = from; i < to; ++i) {
            const int64_t n = rows ? rows[i] : i;
            const int r = static_cast<int>(n % q4::kTileRows);
            const uint8_t* tile = tiles + n / q4::kTileRows * at.tile_bytes;
            for (int64_t b = 0; b < blocks; ++b) {
                const uint8_t* group = tile + at.group_offset(b / at.sets);
                const int set = static_cast<int>(b % at.sets);
                std::memcpy(scale + (i * blocks + b) * at.scale_size, group + at.scale_offset(set, r),
                            static_cast<size_t>(at.scale_size));
                if (m.second != Q4_NONE && !at.second_size) {
                    uint8_t& both = scale[i * blocks + b];
                    second[i * blocks + b] = both >> 4, both &= 15;
                } else if (m.second != Q4_NONE)
                    std::memcpy(second + (i * blocks + b) * at.second_size, group + at.second_offset(set, r),
                                static_cast<size_t>(at.second_size));
            }
            for (int64_t k = 0; k < m.columns; ++k) {
                const int64_t chunk = k / q4::kChunk, j = k % q4::kChunk;
                const uint8_t* data = tile + at.group_offset(chunk / at.group_chunks) + at.head_bytes +
                                      chunk % at.group_chunks * at.chunk_bytes;
                int code = q4::held_code(m.held_bits, data, r, static_cast<int>(j));
                if (q4::is_held_short(m)) code = (code + m.first) ^ (m.bits == 8 && !m.is_unsigned ? 128 : 0);
                else if (m.bits == 8) code ^= m.is_unsigned ? 128 : 0;
                codes[i * m.columns + k] = static_cast<uint8_t>(code);
            }
        }
    };
    try {
        q4::parallel(count, q4::team_for(at, count, threads), unpack);
    } catch (...) {
        return -2;
    }
    return 0;
}
