// w4a8 of super-blocks: the scales of blocks are whole numbers, and meet sums of 16 bits as these are added up to 32.
//
// Levels are unsigned and held codes of a chunk's half; a sum of eight products less what the centre takes fits 16 bits, in which
// the additions wrap around to it. So one multiplication gives a half chunk's sum times its scale, where a float32 scale of its
// own would take five, and the super-block's number and x's scale meet whole chunks. The types are those of GGUF: signed
// bytes of blocks of 16, bytes of blocks of 32 with offsets, or halves of bytes of blocks of 16 with offsets.
#pragma once

#include "a8.hpp"

namespace q4 {

// The scales' type, from which all else follows.
template <int Scales> constexpr bool is_halved() { return Scales != Q4_U8; }
template <int Scales> constexpr bool has_offsets() { return Scales != Q4_I8; }

// A chunk as it is read from a tile.
template <class V, int Bits, int Scales> struct WholeSource {
    const Layout& at;
    const uint8_t *head, *super, *codes;
    Q4_INLINE typename V::Ints levels(int step, int part) const {
        if constexpr (is_short<Bits>()) return short_codes<V, Bits>(codes, step, part);
        return V::nibbles(V::line(codes + step / 2 * 64 + part * V::kLanes * 4), step % 2);
    }
    // A scale of each row, twice: for both sums of 16 bits that are added up.
    Q4_INLINE typename V::Ints scales(int set, int part) const {
        return V::twice(V::template byte_ints<Scales>(head + at.scale_offset(set, part * V::kLanes)));
    }
    // Offsets of a block of 32, or of both blocks of 16.
    Q4_INLINE typename V::Ints offsets(int part) const {
        if constexpr (Scales == Q4_U8) return V::template byte_ints<Q4_U8>(head + at.second_offset(0, part * V::kLanes));
        return V::joined(V::template byte_ints<Q4_HIGH_U4>(head + at.second_offset(0, part * V::kLanes)),
                         V::template byte_ints<Q4_HIGH_U4>(head + at.second_offset(1, part * V::kLanes)));
    }
    Q4_INLINE typename V::Floats number(bool is_offset, int part) const {
        return V::f16(super + ((is_offset ? kTileRows : 0) + part * V::kLanes) * 2);
    }
};

// The same of a panel.
template <class V> struct WholePanel {
    const Panel& panel;
    int64_t chunk;
    Q4_INLINE typename V::Ints levels(int step, int part) const {
        return V::line(panel.codes + (chunk * 8 + step) * 64 + part * V::kLanes * 4);
    }
    Q4_INLINE typename V::Ints scales(int set, int part) const { return ints(panel.scale, set, part); }
    Q4_INLINE typename V::Ints offsets(int part) const { return ints(panel.second, 0, part); }
    Q4_INLINE typename V::Floats number(bool is_offset, int part) const {
        return V::load(panel.super + (chunk * 2 + is_offset) * kTileRows + part * V::kLanes);
    }
    Q4_INLINE typename V::Ints ints(const float* from, int set, int part) const {
        return V::line(reinterpret_cast<const uint8_t*>(from + (chunk * 2 + set) * kTileRows + part * V::kLanes));
    }
};

// Add one chunk's share of one part of the lanes.
template <class V, int Rows, int Scales, class Source>
Q4_INLINE void add_whole(const Source& source, const Activations& x, int64_t chunk, int part, typename V::Floats (&to)[Rows]) {
    const int8_t* levels = x.levels + chunk * Rows * kChunk;
    typename V::Ints sum[Rows], sixteen[Rows];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sixteen[r] = V::sums(x.start[2 * (chunk * Rows + r) + half]);
#pragma GCC unroll 4
        for (int step = 4 * half; step < 4 * half + 4; ++step) {
            const auto line = source.levels(step, part);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) sixteen[r] = V::add_products(sixteen[r], line, levels + r * kChunk + step * 4);
        }
        const auto scales = source.scales(is_halved<Scales>() ? half : 0, part);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[r] = half ? V::add_pairs(sum[r], sixteen[r], scales) : V::pairs_of(sixteen[r], scales);
    }
    const auto number = source.number(false, part);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
        to[r] = V::fma(number, V::mul(V::floats(sum[r]), V::splat(x.scale[chunk * Rows + r])), to[r]);
    if constexpr (has_offsets<Scales>()) {
        const auto offsets = source.offsets(part);
        const auto beside = source.number(true, part);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const auto whole = V::floats(V::pairs_of(offsets, V::sums(x.pairs(chunk * Rows + r))));
            to[r] = V::fma(beside, V::mul(whole, V::splat(x.scale[chunk * Rows + r])), to[r]);
        }
    }
}

template <class V, int Rows, int Bits, int Scales> void whole_direct(const Tile& t, const Activations& x, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    typename V::Floats sum[kParts][Rows];
    for (auto& part : sum)
        for (auto& row : part) row = V::zero();
    Stream<Bits> stream(t.at, t.data, 0);
    for (int64_t chunk = 0; chunk < t.at.chunks; ++chunk, stream.next()) {
        stream.prefetch();
        const WholeSource<V, Bits, Scales> source{t.at, stream.head, stream.super, stream.codes};
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) add_whole<V, Rows, Scales>(source, x, chunk, part, sum[part]);
    }
    for (int part = 0; part < kParts; ++part)
        for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + part * V::kLanes, sum[part][r]);
}

template <class V, int Bits, int Scales> void whole_decode(const Tile& t, int64_t first, int64_t last, Panel& panel) {
    Stream<Bits> stream(t.at, t.data, first);
    uint8_t* to = panel.codes;
    for (int64_t chunk = first; chunk < last; ++chunk, stream.next()) {
        stream.prefetch();
        const WholeSource<V, Bits, Scales> source{t.at, stream.head, stream.super, stream.codes};
        const int64_t place = (chunk - first) * 2 * kTileRows;
        for (int part = 0; part < kTileRows / V::kLanes; ++part) {
            const int lane = part * V::kLanes;
#pragma GCC unroll 8
            for (int step = 0; step < 8; ++step) V::store(to + step * 64 + lane * 4, source.levels(step, part));
            for (int set = 0; set < (is_halved<Scales>() ? 2 : 1); ++set)
                V::store(reinterpret_cast<uint8_t*>(panel.scale + place + set * kTileRows + lane), source.scales(set, part));
            V::store(panel.super + place + lane, source.number(false, part));
            if constexpr (has_offsets<Scales>()) {
                V::store(reinterpret_cast<uint8_t*>(panel.second + place + lane), source.offsets(part));
                V::store(panel.super + place + kTileRows + lane, source.number(true, part));
            }
        }
        to += 8 * 64;
    }
}

template <class V, int Rows, int Scales> void whole_panel(const Panel& panel, const Activations& x, int64_t chunks, float* y) {
    for (int part = 0; part < kTileRows / V::kLanes; ++part) {
        typename V::Floats sum[Rows];
        for (int r = 0; r < Rows; ++r) sum[r] = V::load(y + r * kTileRows + part * V::kLanes);
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            add_whole<V, Rows, Scales>(WholePanel<V>{panel, chunk}, x, chunk, part, sum);
        for (int r = 0; r < Rows; ++r) V::store(y + r * kTileRows + part * V::kLanes, sum[r]);
    }
}

// Call pick(held bits, the scales' type) where a matrix has such kernels; else other().
template <class V, class Pick, class Other> auto with_whole(const q4_matrix& m, const Pick& pick, const Other& other) {
    if constexpr (V::kHasWhole)
        switch (whole_bits(m)) {
        case 2: return pick(std::integral_constant<int, 2>{}, std::integral_constant<int, Q4_LOW_U4>{});
        case 3: return pick(std::integral_constant<int, 3>{}, std::integral_constant<int, Q4_I8>{});
        case 4: return pick(std::integral_constant<int, 4>{}, std::integral_constant<int, Q4_U8>{});
        case 5: return pick(std::integral_constant<int, 5>{}, std::integral_constant<int, Q4_U8>{});
        case 6: return pick(std::integral_constant<int, 6>{}, std::integral_constant<int, Q4_I8>{});
        default: break;
        }
    return other();
}

}  // namespace q4
