// Reading a tile's stream: numbers of any type, and where the next chunk lies.
#pragma once

#include "kernel.hpp"

#define Q4_INLINE [[gnu::always_inline]] inline

namespace q4 {

template <class V> Q4_INLINE typename V::Floats numbers(int32_t type, const uint8_t* p) {
    switch (type) {
    case Q4_F32: return V::f32(p);
    case Q4_F16: return V::f16(p);
    case Q4_BF16: return V::bf16(p);
    case Q4_E4M3: return V::e4m3(p);
    case Q4_E8M0: return V::e8m0(p);
    case Q4_U8: return V::u8(p);
    case Q4_I8: return V::i8(p);
    case Q4_LOW_U4: return V::nibble(p, false);
    case Q4_HIGH_U4: return V::nibble(p, true);
    default: return V::i32(p);
    }
}

// Codes are prefetched this far ahead of the loads.
constexpr int kAhead = 4096;

// Walks through the chunks of one tile.
template <int Bits> struct Stream {
    static constexpr int kChunkBytes = kTileRows * kChunk * Bits / 8;
    const Layout& at;
    const uint8_t* head;   // of the chunk's group
    const uint8_t* super;  // of its super-block
    const uint8_t* codes;  // of the chunk
    int64_t left;          // chunks of the group, this one included
    int64_t super_left;    // groups of the super-block, this one included

    Q4_INLINE Stream(const Layout& layout, const uint8_t* tile, int64_t chunk) : at(layout) {
        const int64_t inside = chunk % at.group_chunks, group = chunk / at.group_chunks;
        head = tile + at.group_offset(group), super = tile + at.super_offset(group);
        codes = head + at.head_bytes + inside * kChunkBytes;
        left = at.group_chunks - inside;
        super_left = at.super_groups ? at.super_groups - group % at.super_groups : 0;
    }
    Q4_INLINE void prefetch() const {
        for (int line = 0; line < kChunkBytes; line += 64) __builtin_prefetch(codes + kAhead + line);
        if (left == 1)  // the next group's numbers follow
            for (int64_t line = 0; line < at.head_bytes; line += 64) __builtin_prefetch(codes + kAhead + kChunkBytes + line);
    }
    Q4_INLINE void next() {
        codes += kChunkBytes;
        if (--left) return;
        head = codes;
        codes += at.head_bytes;
        left = at.group_chunks;
        if (--super_left) return;  // never 0 without super-blocks
        super += at.super_bytes;
        super_left = at.super_groups;
    }
};

// Whether codes of 4 or 8 bits are held in fewer.
template <int Bits> constexpr bool is_short() { return Bits != 4 && Bits != 8; }

// Short codes of four in-features of each row, as bytes.
template <class V, int Bits> Q4_INLINE typename V::Ints short_codes(const uint8_t* codes, int step, int part) {
    const int lane = part * V::kLanes * 4;
    const Fields of = fields_of(Bits, step);
    const auto field = [&](int i) __attribute__((always_inline)) {
        const Field f = of.field[i];
        return V::field(V::line(codes + f.line * 64 + lane), f.from - f.to, f.mask() << f.to);
    };
    typename V::Ints out = field(0);
    if (of.count > 1) out = V::merged(out, field(1));
    if (of.count > 2) out = V::merged(out, field(2));
    return out;
}

// A scale's type that is asked for at each chunk; a type that the kernel is made for costs no jump.
constexpr int kAnyType = -1;

// Types of scales that super-blocks may multiply, for which kernels are made.
constexpr bool is_whole_type(int type) { return type == Q4_I8 || type == Q4_LOW_U4; }

// Scale and second number of the chunk that a stream is at.
template <class V, int Second, int ScaleType> struct Numbers {
    const q4_matrix& m;
    const Layout& at;
    const uint8_t *head, *super;
    // A stored number, times its super-block's: rounded as the codec rounds.
    Q4_INLINE typename V::Floats whole(typename V::Floats stored, int row) const {
        return at.super_groups ? V::mul(stored, V::f16(super + row * 2)) : stored;
    }
    Q4_INLINE typename V::Floats scale(int set, int part) const {
        const uint8_t* from = head + at.scale_offset(set, part * V::kLanes);
        if constexpr (ScaleType != kAnyType && !is_whole_type(ScaleType)) return numbers<V>(ScaleType, from);
        return whole(numbers<V>(ScaleType == kAnyType ? m.scale_type : ScaleType, from), part * V::kLanes);
    }
    Q4_INLINE typename V::Floats second(int set, int part) const {
        if constexpr (Second == Q4_NONE) return V::zero();
        const int32_t type = ScaleType == Q4_LOW_U4 ? int32_t{Q4_HIGH_U4} : m.second_type;
        const auto stored = numbers<V>(type, head + at.second_offset(set, part * V::kLanes));
        if constexpr (Second == Q4_ZERO) return stored;
        return whole(stored, kTileRows + part * V::kLanes);
    }
};

}  // namespace q4
