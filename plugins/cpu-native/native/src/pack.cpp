// Between a source's own order and tiles: one pass, each byte of the source read once.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstring>
#include <memory>

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

// Bytes of a row's codes in the source, without what separates its groups.
int64_t bytes_of_row(const q4_matrix& m, const q4_source& s) {
    if (m.bits == 8) return m.columns;
    return s.order == Q4_HALF_SPLIT ? ceil_div(m.columns, 2 * int64_t{s.half}) * s.half : ceil_div(m.columns, 2);
}

// The bytes of a row's codes one after another: where they lie, or else copied to `room`.
const uint8_t* read_bytes(const q4_source& s, const uint8_t* row, int64_t count, uint8_t* room) {
    if (s.code_byte == 1 && (s.code_group == s.group_bytes || count <= s.group_bytes)) return row;
    for (int64_t first = 0; first < count; first += s.group_bytes) {
        const uint8_t* group = row + first / s.group_bytes * s.code_group;
        const int64_t length = std::min(s.group_bytes, count - first);
        if (s.code_byte == 1)
            std::memcpy(room + first, group, static_cast<size_t>(length));
        else
            for (int64_t j = 0; j < length; ++j) room[first + j] = group[j * s.code_byte];
    }
    return room;
}

// The codes of one row, one per byte, in the order of in-features, and zeros up to a whole chunk.
void read_codes(const q4_matrix& m, const Layout& at, const q4_source& s, const uint8_t* in, int64_t count, uint8_t* codes) {
    const uint8_t flip = m.is_unsigned ? 128 : 0;
    const int64_t columns = m.columns;  // bytes that are written might be anything's
    uint8_t* to = codes;
    switch (s.order) {
    case Q4_BYTES:
        for (int64_t j = 0; j < columns; ++j) to[j] = static_cast<uint8_t>(in[j] ^ flip);
        break;
    case Q4_LOW_FIRST:
        for (int64_t j = 0; j < count; ++j) to[2 * j] = in[j] & 15, to[2 * j + 1] = in[j] >> 4;
        break;
    case Q4_HIGH_FIRST:
        for (int64_t j = 0; j < count; ++j) to[2 * j] = in[j] >> 4, to[2 * j + 1] = in[j] & 15;
        break;
    default:
        for (int64_t first = 0; first < count; first += s.half, in += s.half, to += 2 * s.half)
            for (int j = 0; j < s.half; ++j) to[j] = in[j] & 15, to[s.half + j] = in[j] >> 4;
    }
    std::fill(codes + columns, codes + at.chunks * kChunk, uint8_t{0});  // over the padding nibbles of the source
}

// A line of a chunk holds a word of each row: four codes of 8 bits, or eight of 4 bits, of which byte i has i and 4 + i.
using Word = uint32_t;
constexpr Word kLow = 0x0f0f0f0f;

Word word_at(const uint8_t* bytes) {
    Word word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
}

template <bool IsHighFirst> void order_pairs(const uint8_t* in, int64_t count, Word* words) {
    for (int64_t j = 0; j < count; ++j) {  // 0 1 2 3 4 5 6 7 to 0 4 1 5 2 6 3 7: the middle bytes change places, then halves do
        Word word = word_at(in + 4 * j);
        if (IsHighFirst) word = (word >> 4 & kLow) | (word & kLow) << 4;
        const Word bytes = (word ^ word >> 8) & 0x0000ff00;
        word ^= bytes ^ bytes << 8;
        const Word halves = (word ^ word >> 4) & 0x00f000f0;
        words[j] = word ^ halves ^ halves << 4;
    }
}

void order_halves(const uint8_t* in, int64_t count, Word* words) {
    for (int64_t j = 0; j < count; j += 4, in += kChunk / 2)  // 16 low halves, then 16 high ones
        for (int i = 0; i < 2; ++i) {
            const Word first = word_at(in + 8 * i), second = word_at(in + 8 * i + 4);
            words[j + i] = (first & kLow) | (second & kLow) << 4;
            words[j + 2 + i] = (first >> 4 & kLow) | (second & ~kLow);
        }
}

// Scratch of one thread.
struct Scratch {
    uint8_t *bytes, *codes;  // of a row
    Word* words;             // of the rows of a tile

    // Room for the codes of a row, in whole groups of HALF_SPLIT and whole chunks.
    static int64_t row_room(const Layout& at, const q4_source& s) {
        return ceil_div(at.chunks * kChunk + 2 * std::max<int64_t>(s.half, 1), kChunk) * kChunk;
    }
    static int64_t size(const Layout& at, const q4_source& s) { return 2 * row_room(at, s) + at.chunks * kTileRows * kChunk; }

    Scratch(uint8_t* memory, const Layout& at, const q4_source& s)
        : bytes(memory), codes(memory + row_room(at, s)), words(reinterpret_cast<Word*>(codes + row_room(at, s))) {}
};

// The words of a row: of whole chunks in the usual orders by what turns several codes at once.
void read_words(const q4_matrix& m, const Layout& at, const q4_source& s, const uint8_t* row, const Scratch& room, Word* words) {
    const int64_t count = bytes_of_row(m, s), eights = at.chunks * kChunk / 8;
    const uint8_t* in = read_bytes(s, row, count, room.bytes);
    const bool is_whole = m.columns % kChunk == 0;
    if (m.bits == 8) {
        read_codes(m, at, s, in, count, reinterpret_cast<uint8_t*>(words));
    } else if (is_whole && s.order == Q4_LOW_FIRST) {
        order_pairs<false>(in, eights, words);
    } else if (is_whole && s.order == Q4_HIGH_FIRST) {
        order_pairs<true>(in, eights, words);
    } else if (is_whole && 2 * s.half == kChunk) {
        order_halves(in, eights, words);
    } else {
        read_codes(m, at, s, in, count, room.codes);
        for (int64_t j = 0; j < eights; ++j) words[j] = word_at(room.codes + 8 * j) | word_at(room.codes + 8 * j + 4) << 4;
    }
}

// From rows of words, `stride` apart, to the lines of a chunk.
template <int Lines> void pack_chunk(const Word* words, int64_t stride, int rows, uint8_t* data) {
    using Pair = uint64_t;  // two at a time take half the loads and stores
    int r = 0;
    for (; r + 1 < rows; r += 2, words += 2 * stride)
        for (int line = 0; line < Lines; line += 2) {
            Pair even, odd;
            std::memcpy(&even, words + line, sizeof(Pair));
            std::memcpy(&odd, words + stride + line, sizeof(Pair));
            const Pair first = (even & 0xffffffff) | odd << 32, second = even >> 32 | (odd >> 32 << 32);
            std::memcpy(data + 64 * line + 4 * r, &first, sizeof(Pair));
            std::memcpy(data + 64 * (line + 1) + 4 * r, &second, sizeof(Pair));
        }
    for (int line = 0; r < rows && line < Lines; ++line) std::memcpy(data + 64 * line + 4 * r, words + line, sizeof(Word));
}

// One number of each row, `step` bytes apart.
template <class Number> void pack_numbers(const uint8_t* from, int64_t step, int rows, uint8_t* to) {
    for (int r = 0; r < rows; ++r) std::memcpy(to + r * sizeof(Number), from + r * step, sizeof(Number));
}
void pack_numbers(const uint8_t* from, int64_t step, int rows, int size, uint8_t* to) {
    if (size == 4)
        pack_numbers<uint32_t>(from, step, rows, to);
    else if (size == 2)
        pack_numbers<uint16_t>(from, step, rows, to);
    else
        pack_numbers<uint8_t>(from, step, rows, to);
}

// Call body(chunk, where its codes lie) for each chunk of a tile.
template <class Body> void for_chunks(const Layout& at, uint8_t* tile, const Body& body) {
    for (int64_t group = 0, chunk = 0; group < at.groups; ++group) {
        uint8_t* data = tile + at.group_offset(group) + at.head_bytes;
        for (int64_t i = 0; i < at.group_chunks && chunk < at.chunks; ++i, ++chunk, data += at.chunk_bytes) body(chunk, data);
    }
}

void pack_tile(const q4_matrix& m, const Layout& at, const q4_source& s, int64_t tile, uint8_t* out, const Scratch& room) {
    const int64_t first = tile * kTileRows, blocks = ceil_div(m.columns, m.block);
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, m.rows - first));
    const bool is_short = is_held_short(m);
    if (rows < kTileRows || is_short || blocks < at.groups * at.sets) std::memset(out, 0, static_cast<size_t>(at.tile_bytes));
    for (int64_t i = 0; i < at.supers; ++i) {
        const int64_t place = first * at.supers + i, scale = s.super_scale_step, second = s.super_second_step;
        uint8_t* super = out + i * at.super_bytes;
        pack_numbers<uint16_t>(s.super_scale + place * scale, at.supers * scale, rows, super);
        if (m.second != Q4_NONE)
            pack_numbers<uint16_t>(s.super_second + place * second, at.supers * second, rows, super + 2 * kTileRows);
    }
    for (int64_t b = 0; b < blocks; ++b) {
        uint8_t* group = out + at.group_offset(b / at.sets);
        const int set = static_cast<int>(b % at.sets);
        uint8_t *scale = group + at.scale_offset(set, 0), *to = group + at.second_offset(set, 0);
        pack_numbers(s.scale + first * s.scale_row + b * s.scale_block, s.scale_row, rows, at.scale_size, scale);
        if (m.second == Q4_NONE) continue;
        const uint8_t* second = s.second + first * s.second_row + b * s.second_block;
        if (at.second_size)
            pack_numbers(second, s.second_row, rows, at.second_size, to);
        else
            for (int r = 0; r < rows; ++r) to[r] = static_cast<uint8_t>((to[r] & 15) | second[r * s.second_row] << 4);
    }
    const int64_t stride = at.chunks * at.chunk_bytes / 64;
    for (int r = 0; r < rows; ++r) {
        const uint8_t* row = s.codes + (first + r) * s.code_row;
        if (!is_short) {
            read_words(m, at, s, row, room, room.words + r * stride);
            continue;
        }
        const int64_t count = bytes_of_row(m, s);
        read_codes(m, at, s, read_bytes(s, row, count, room.bytes), count, room.codes);
        for_chunks(at, out, [&](int64_t chunk, uint8_t* data) {
            const uint8_t* codes = room.codes + chunk * kChunk;
            for (int j = 0; j < kChunk && chunk * kChunk + j < m.columns; ++j)
                hold_code(m.held_bits, (m.bits == 8 ? codes[j] ^ 128 : codes[j]) - m.first, data, r, j);
        });
    }
    if (is_short) return;
    for_chunks(at, out, [&](int64_t chunk, uint8_t* data) {
        if (m.bits == 8)
            pack_chunk<8>(room.words + 8 * chunk, stride, rows, data);
        else
            pack_chunk<4>(room.words + 4 * chunk, stride, rows, data);
    });
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
        const int64_t size = q4::Scratch::size(at, *source);
        const std::unique_ptr<uint8_t[]> memory(new uint8_t[static_cast<size_t>(q4::team_size(at.tiles, threads) * size)]);
        q4::parallel(at.tiles, threads, [&](int64_t from, int64_t to, int thread) {
            const q4::Scratch room(memory.get() + thread * size, at, *source);
            for (int64_t tile = from; tile < to; ++tile)
                q4::pack_tile(*matrix, at, *source, tile, tiles + tile * at.tile_bytes, room);
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
