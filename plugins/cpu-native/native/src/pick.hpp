// Which instantiation of a kernel serves a matrix; included by the one file of each instruction set.
#pragma once

#include "a16.hpp"
#include "a8.hpp"
#include "exact.hpp"
#include "finish.hpp"
#include "operations.hpp"
#include "outliers.hpp"
#include "quantize.hpp"
#include "spikes.hpp"

namespace q4 {

// Run `pick` with the constants of a matrix: (second, held bits).
template <class Pick> auto with_form(const q4_matrix& m, const Pick& pick) {
    const auto with_bits = [&](auto second) {
        if constexpr (decltype(second)::value != Q4_ZERO) switch (m.held_bits) {
            case 2: return pick(second, std::integral_constant<int, 2>{});
            case 3: return pick(second, std::integral_constant<int, 3>{});
            case 5: return pick(second, std::integral_constant<int, 5>{});
            case 6: return pick(second, std::integral_constant<int, 6>{});
            default: break;
            }
        return m.bits == 8 ? pick(second, std::integral_constant<int, 8>{}) : pick(second, std::integral_constant<int, 4>{});
    };
    if (m.second == Q4_OFFSET) return with_bits(std::integral_constant<int, Q4_OFFSET>{});
    if (m.second == Q4_ZERO) return with_bits(std::integral_constant<int, Q4_ZERO>{});
    return with_bits(std::integral_constant<int, Q4_NONE>{});
}

// The same with (kind of levels, whether a block is half a chunk).
template <class V, int Bits, class Pick> auto with_levels(const q4_matrix& m, const Pick& pick) {
    const auto with_halves = [&](auto kind) {
        return m.block == 16 ? pick(kind, std::true_type{}) : pick(kind, std::false_type{});
    };
    if constexpr (is_short<Bits>()) {
        constexpr bool kIsShort = Bits > 4 && V::kShort >= 0;
        return with_halves(std::integral_constant<int, kIsShort ? V::kShort : V::kNarrow>{});
    }
    if constexpr (Bits == 4 && V::kKinds > 1)
        if (!has_wide_levels(m)) return with_halves(std::integral_constant<int, V::kNarrow>{});
    return with_halves(std::integral_constant<int, V::kWide>{});
}

// The same for pairs of levels, of a matrix with this form.
template <class V, int Second, int Bits, class Pick> auto with_pairs(const q4_matrix& m, const Pick& pick) {
    const auto with_halves = [&](auto kind) {
        return m.block == 16 ? pick(kind, std::true_type{}) : pick(kind, std::false_type{});
    };
    if constexpr (Bits == 4) {
        if constexpr (Second == Q4_NONE)
            if (has_words(m)) return with_halves(std::integral_constant<int, V::kWordPairs>{});
        bool is_plain = true;
        for (int q = 0; q < 16; ++q) is_plain = is_plain && m.level[q] == q;
        if (Second == Q4_ZERO || is_plain) return with_halves(std::integral_constant<int, V::kPlainPairs>{});
    }
    return with_halves(std::integral_constant<int, V::kLevelPairs>{});
}

// The same with the type of the scales, for those that checkpoints have with such blocks: NVFP4, Q2_K, Q3_K and Q6_K have
// blocks of half a chunk. All others are asked for their type at each chunk.
template <int Second, int Bits, bool Halves, class Pick> auto with_scale(const q4_matrix& m, const Pick& pick) {
    const auto is = [&](int32_t type) { return m.scale_type == type; };
    if constexpr (Halves) {
        if constexpr (Bits == 2 && Second == Q4_OFFSET)
            if (is(Q4_LOW_U4) && m.second_type == Q4_HIGH_U4) return pick(std::integral_constant<int, Q4_LOW_U4>{});
        if constexpr (Bits % 3 == 0 && Second == Q4_NONE)
            if (is(Q4_I8)) return pick(std::integral_constant<int, Q4_I8>{});
        if constexpr (Bits == 4 && Second == Q4_NONE)
            if (is(Q4_E4M3)) return pick(std::integral_constant<int, Q4_E4M3>{});
    } else {
        if constexpr (is_short<Bits>() || Second == Q4_NONE)
            if (is(Q4_F16)) return pick(std::integral_constant<int, Q4_F16>{});
        if constexpr (!is_short<Bits>() && Second == Q4_NONE)
            if (is(Q4_F32)) return pick(std::integral_constant<int, Q4_F32>{});
        if constexpr (Bits == 4 && Second == Q4_NONE)
            if (is(Q4_E8M0)) return pick(std::integral_constant<int, Q4_E8M0>{});
    }
    return pick(std::integral_constant<int, kAnyType>{});
}

template <class V, int Rows, int Kind, int Second, int Bits, bool Halves> DirectKernel a16_kernel(const q4_matrix& m) {
    return with_scale<Second, Bits, Halves>(m, [](auto scale) -> DirectKernel {
        constexpr int kScale = decltype(scale)::value;
        if constexpr (Rows == 1 && has_byte_products<V, Kind, Bits>())
            return a8_direct<V, 1, V::kBytes, Second, kScale, Bits, Halves>;
        else if constexpr (V::kHasSingle && Rows == 1 && Kind == V::kWordPairs)
            return a16_single<V, kScale, Halves>;
        else
            return a16_direct<V, Rows, Kind, Second, kScale, Bits, Halves>;
    });
}

template <class V, int Rows> DirectKernel direct_kernel(const q4_matrix& m, int32_t family) {
    return with_form(m, [&](auto second, auto bits) -> DirectKernel {
        constexpr int kSecond = decltype(second)::value;
        constexpr int kBits = decltype(bits)::value;
        if (family == Q4_A8)
            return with_levels<V, kBits>(m, [&](auto kind, auto halves) {
                return with_scale<kSecond, kBits, decltype(halves)::value>(m, [](auto scale) -> DirectKernel {
                    return a8_direct<V, Rows, decltype(kind)::value, decltype(second)::value, decltype(scale)::value,
                                     decltype(bits)::value, decltype(halves)::value>;
                });
            });
        if (family == Q4_A16)
            return with_pairs<V, kSecond, kBits>(m, [&](auto kind, auto halves) {
                return a16_kernel<V, Rows, decltype(kind)::value, decltype(second)::value, decltype(bits)::value,
                                  decltype(halves)::value>(m);
            });
        if (kBits == 4 && whole_unit(m.codebook) > 0.0f) return exact_direct<V, Rows, kSecond, kBits, typename V::WholeBook>;
        return exact_direct<V, Rows, kSecond, kBits, typename V::Codebook>;
    });
}

// What puts x in order for a16's direct kernel of one row.
template <class V> ChunkOrder single_order(const q4_matrix& m) {
    return with_form(m, [&](auto second, auto bits) {
        constexpr int kBits = decltype(bits)::value;
        return with_pairs<V, decltype(second)::value, kBits>(m, [](auto kind, auto) -> ChunkOrder {
            if constexpr (has_byte_products<V, decltype(kind)::value, kBits>()) return V::arrange_bytes;
            if constexpr (V::kHasSingle && decltype(kind)::value == V::kWordPairs) return V::arrange_words;
            return nullptr;
        });
    });
}

// Whether the exact path has panels; where it has none, nobody asks for them.
template <class V> constexpr bool has_exact_panels() { return V::kExactPanelFrom < INT64_MAX; }

template <class V> PanelDecoder decoder(const q4_matrix& m, int32_t family) {
    return with_form(m, [&](auto second, auto bits) -> PanelDecoder {
        constexpr int kSecond = decltype(second)::value;
        constexpr int kBits = decltype(bits)::value;
        if (family == Q4_A8)
            return with_levels<V, kBits>(m, [](auto kind, auto halves) -> PanelDecoder {
                return a8_decode<V, decltype(kind)::value, kSecond, kBits, decltype(halves)::value>;
            });
        if (family == Q4_A16)
            return with_pairs<V, kSecond, kBits>(m, [](auto kind, auto halves) -> PanelDecoder {
                return a16_decode<V, decltype(kind)::value, kSecond, kBits, decltype(halves)::value>;
            });
        if constexpr (has_exact_panels<V>()) {
            if (kBits == 4 && whole_unit(m.codebook) > 0.0f) return exact_decode<V, kSecond, kBits, typename V::WholeBook>;
            return exact_decode<V, kSecond, kBits, typename V::Codebook>;
        }
        return nullptr;
    });
}

template <class V, int Rows> PanelKernel panel_kernel(const q4_matrix& m, int32_t family) {
    if constexpr (has_exact_panels<V>())
        if (family == Q4_EXACT) return exact_panel<V, Rows>;
    return with_form(m, [&](auto second, auto bits) {
        if (family == Q4_A16)
            return with_pairs<V, decltype(second)::value, decltype(bits)::value>(m, [](auto kind, auto halves) -> PanelKernel {
                return a16_panel<V, Rows, decltype(kind)::value, decltype(second)::value, decltype(halves)::value>;
            });
        return with_levels<V, decltype(bits)::value>(m, [](auto kind, auto halves) -> PanelKernel {
            return a8_panel<V, Rows, decltype(kind)::value, decltype(second)::value, decltype(halves)::value>;
        });
    });
}

template <class V> DirectKernel direct_for(const q4_matrix& m, int32_t family, int rows) {
    if constexpr (V::kDirectRows >= 8)
        if (rows == 8) return direct_kernel<V, 8>(m, family);
    if (rows == 4) return direct_kernel<V, 4>(m, family);
    if (rows == 2) return direct_kernel<V, 2>(m, family);
    return direct_kernel<V, 1>(m, family);
}

template <class V> PanelKernel panel_for(const q4_matrix& m, int32_t family, int rows) {
    if constexpr (has_exact_panels<V>())
        if (family == Q4_EXACT && rows == V::kExactPanelRows) return exact_panel<V, V::kExactPanelRows>;
    if (family == Q4_A8 && rows == V::kA8PanelRows) return panel_kernel<V, V::kA8PanelRows>(m, family);
    if (family == Q4_A16 && rows == V::kA16PanelRows) return panel_kernel<V, V::kA16PanelRows>(m, family);
    if constexpr (V::kDirectRows >= 8)
        if (rows == 8) return panel_kernel<V, 8>(m, family);
    if (rows == 4) return panel_kernel<V, 4>(m, family);
    if (rows == 2) return panel_kernel<V, 2>(m, family);
    return panel_kernel<V, 1>(m, family);
}

template <class V> SpikeKernel spike_kernel(const q4_matrix& m) {
    return with_form(m, [](auto second, auto bits) -> SpikeKernel {
        return spikes_direct<V, decltype(second)::value, decltype(bits)::value>;
    });
}

template <class V> OutlierKernel outlier_kernel(const q4_matrix& m) {
    return with_form(m, [](auto second, auto bits) -> OutlierKernel {
        return multiply_outliers<V, decltype(second)::value, decltype(bits)::value>;
    });
}

template <class V> ColumnDecoder column_decoder(const q4_matrix& m) {
    return with_form(m, [](auto second, auto bits) -> ColumnDecoder {
        return decode_columns<V, decltype(second)::value, decltype(bits)::value>;
    });
}

template <class V> Kernels make_kernels() {
    return {direct_for<V>,
            decoder<V>,
            panel_for<V>,
            V::kDirectRows,
            {V::kExactPanelFrom, V::kA8PanelFrom, V::kA16PanelFrom},
            {V::kExactPanelRows, V::kA8PanelRows, V::kA16PanelRows},
            V::kIsWideSigned,
            widen_chunk<V>,
            quantize_chunk<V>,
            quantize_word_chunk<V>,
            finish<V>,
            nullptr,
            &operations_of<V>,
            spike_kernel<V>,
            find_outliers<V>,
            outlier_kernel<V>,
            column_decoder<V>,
            single_order<V>,
            quantizer_of_runs<V>()};
}

}  // namespace q4
