#include "case.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <tuple>
#include <utility>

namespace q4test {
namespace {

constexpr float kNf4[16] = {-1.0f,
                            -0.6961928009986877f,
                            -0.5250730514526367f,
                            -0.39491748809814453f,
                            -0.28444138169288635f,
                            -0.18477343022823334f,
                            -0.09105003625154495f,
                            0.0f,
                            0.07958029955625534f,
                            0.16093020141124725f,
                            0.24611230194568634f,
                            0.33791524171829224f,
                            0.44070982933044434f,
                            0.5626170039176941f,
                            0.7229568362236023f,
                            1.0f};
constexpr float kFp4[8] = {0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f,
                           0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f};
constexpr float kE2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Levels as a caller makes them: exact where the values are small multiples of 1 or 0.5, else rounded to ±124, and to words
// of up to 14 bits.
void set_levels(q4_matrix& m, int most_word) {
    const float low = *std::min_element(m.codebook, m.codebook + 16);
    float peak = 0.0f;
    for (const float value : m.codebook) peak = std::max(peak, std::fabs(value));
    for (const float step : {1.0f, 0.5f}) {
        bool is_exact = true;
        for (const float value : m.codebook) {
            const float level = (value - low) / step;
            is_exact = is_exact && level <= 24.0f && level == std::floor(level);
        }
        if (!is_exact) continue;
        for (int q = 0; q < 16; ++q) m.level[q] = static_cast<uint8_t>((m.codebook[q] - low) / step);
        m.center = -low / step, m.step = step;
        return;
    }
    m.word_step = std::max(peak, 0.001f) / static_cast<float>(most_word);
    for (int q = 0; q < 16; ++q) m.word[q] = static_cast<int16_t>(std::lround(m.codebook[q] / m.word_step));
    m.step = peak / 124.0f, m.center = 128.0f;
    for (int q = 0; q < 16; ++q) m.level[q] = static_cast<uint8_t>(std::lround(m.codebook[q] / m.step) + 128);
}

void choose_codes(Random& r, q4_matrix& m, bool is_whole, bool is_extreme) {
    m.step = 1.0f, m.held_bits = m.bits;
    if (m.bits == 4 && m.second != Q4_ZERO && !is_extreme && r.chance(0.2)) {
        m.held_bits = r.of<int32_t>({2, 3});
        m.first = static_cast<int32_t>(r.between(0, 16 - (1 << m.held_bits)));
        m.center = static_cast<float>(r.of<int64_t>({0, 8, r.between(0, 127)}));
        for (int q = 0; q < 16; ++q) m.level[q] = static_cast<uint8_t>(q), m.codebook[q] = static_cast<float>(q) - m.center;
        return;
    }
    if (m.bits == 8) {
        for (float& value : m.codebook) value = static_cast<float>(r.between(-9, 9));  // must not matter
        for (uint8_t& level : m.level) level = static_cast<uint8_t>(r.next());
        if (m.second != Q4_ZERO && r.chance(0.6)) {
            m.held_bits = r.of<int32_t>({5, 6});
            m.first = static_cast<int32_t>(r.of<int64_t>({0, 96, 112, 192, 128, r.between(0, 192)}));
        }
        m.is_unsigned = r.chance(0.5);
        m.center = static_cast<float>(m.second == Q4_NONE || r.chance(0.3) ? 128 : r.chance(0.7) ? 0 : r.between(0, 255));
        return;
    }
    const int64_t kind = is_extreme ? 6 : m.second != Q4_NONE ? 0 : is_whole ? r.between(0, 3) : r.between(0, 7);
    for (int q = 0; q < 16; ++q) {
        const float sign = q < 8 ? 1.0f : -1.0f;
        switch (kind) {
        case 0: m.codebook[q] = static_cast<float>(q); break;
        case 1: m.codebook[q] = static_cast<float>(q - 8); break;
        case 2: m.codebook[q] = sign * kE2m1[q % 8]; break;
        case 3: m.codebook[q] = static_cast<float>(r.between(-127, 127)); break;
        case 4: m.codebook[q] = kNf4[q]; break;
        case 5: m.codebook[q] = sign * kFp4[q % 8]; break;
        case 6: m.codebook[q] = static_cast<float>(r.bell() * 3); break;
        default: m.codebook[q] = 0.5f * static_cast<float>(r.between(-300, 300));
        }
    }
    const auto most_word = static_cast<int>(r.of<int64_t>({192, 4095, 4096, 8190, 8191}));
    set_levels(m, most_word);
    if (is_extreme || (kind >= 6 && r.chance(0.5))) {  // levels that have nothing to do with the codebook
        const int64_t most = r.of<int64_t>({24, 25, 32, 33, 40, 128, 255});
        for (uint8_t& level : m.level) level = static_cast<uint8_t>(r.between(most > 24, most));
        m.level[r.between(0, 15)] = static_cast<uint8_t>(most);
        for (int16_t& word : m.word) word = static_cast<int16_t>(r.between(-most_word, most_word));
        if (is_extreme) m.word[std::max_element(m.level, m.level + 16) - m.level] = static_cast<int16_t>(r.chance(0.5) ? most_word : -most_word);
        m.word_step = static_cast<float>(std::fabs(r.bell()) + 0.01);
        m.center = most > 24 ? 128.0f : static_cast<float>(r.between(0, 255));
        m.step = static_cast<float>(std::fabs(r.bell()) + 0.01);
    }
}

void choose_matrix(Random& r, Case& c, const Sizes& sizes) {
    q4_matrix& m = c.matrix;
    const bool is_large = sizes.has_large && r.chance(0.02), is_long = sizes.has_large && r.chance(0.005);
    m.rows = r.chance(0.3) ? r.of<int64_t>({1, 1, 2, 15, 16, 17, 31, 32, 33, 48}) : r.between(1, r.chance(0.2) ? 90 : 40);
    m.columns = r.chance(0.4) ? r.of<int64_t>({1, 1, 2, 16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 192, 256})
                              : r.between(1, r.chance(0.05) ? 2600 : 260);
    if (is_large) m.rows = r.between(280, 600), m.columns = r.between(280, 600);
    if (is_long) m.rows = r.between(1, 4), m.columns = r.between(5000, 40000);
    m.block = r.of<int64_t>({16, 16, 32, 32, 64, 64, 96, 128, 256, ceil_div(m.columns, 32) * 32});
    m.bits = r.chance(0.15) ? 8 : 4;
    if (c.is_extreme) m.bits = 4;
    m.second = c.is_extreme || r.chance(0.5) ? Q4_NONE : r.chance(0.5) ? Q4_OFFSET : Q4_ZERO;
    m.scale_type = r.of<int32_t>({Q4_F32, Q4_F32, Q4_BF16, Q4_F16, Q4_F16, Q4_E4M3, Q4_E4M3, Q4_E8M0, Q4_U8, Q4_I8, Q4_I32});
    m.second_type = r.of<int32_t>({Q4_F32, Q4_BF16, Q4_F16, Q4_E4M3, Q4_E8M0, Q4_U8, Q4_U8, Q4_I8, Q4_I32});
    choose_codes(r, m, c.is_whole, c.is_extreme);
    c.blocks = ceil_div(m.columns, m.block);
    const int64_t unit = m.block == 16 ? 2 : 1;
    if (m.second == Q4_ZERO || c.blocks % unit || !r.chance(0.25)) return;
    m.super_blocks = unit * r.of<int64_t>({1, 2, 4, 8, c.blocks / unit});
    while (c.blocks % m.super_blocks) m.super_blocks -= unit;
    m.scale_type = r.of<int32_t>({Q4_U8, Q4_I8}), m.second_type = r.of<int32_t>({Q4_U8, Q4_U8, Q4_I8});
    if (m.second == Q4_OFFSET && r.chance(0.4)) m.scale_type = Q4_LOW_U4, m.second_type = Q4_HIGH_U4;
}

struct Axis {
    int64_t count;
    int64_t* stride;
    bool may_repeat;  // whether a stride may be 0
};

// Lay axes out over memory in some order, with gaps, backwards, or repeating: returns how many bytes they span, and at
// which of these the first element lies.
std::pair<int64_t, int64_t> lay_out(Random& r, std::vector<Axis> axes, int64_t unit, bool is_plain, int64_t gap_unit) {
    if (!is_plain)
        for (size_t i = axes.size(); i > 1; --i) std::swap(axes[i - 1], axes[static_cast<size_t>(r.next() % i)]);
    int64_t span = unit, origin = 0;
    for (const Axis& axis : axes) {
        *axis.stride = span;
        if (is_plain) {
            span *= axis.count;
            continue;
        }
        if (axis.count == 1) *axis.stride = r.between(-9, 9) * gap_unit;  // never used
        if (axis.count == 1) continue;
        if (r.chance(0.3)) *axis.stride += r.between(1, 5) * gap_unit;
        if (axis.may_repeat && r.chance(0.03)) *axis.stride = 0;
        const int64_t over = *axis.stride * (axis.count - 1);
        if (r.chance(0.1)) *axis.stride = -*axis.stride, origin += over;
        span += over;
    }
    return {span, origin};
}

double choose_number(Random& r, int32_t type, bool is_second, bool is_zero, bool is_whole) {
    if (is_whole) return is_second ? static_cast<double>(r.between(0, 12)) : std::ldexp(1.0, static_cast<int>(r.between(-2, 2)));
    if (is_zero && r.chance(0.7)) return static_cast<double>(r.between(0, 15));
    if (type == Q4_F16 && r.chance(0.1)) return std::ldexp(static_cast<double>(r.between(0, 1023)), -24);  // subnormal
    if (r.chance(0.02)) return 0.0;
    const double sign = r.chance(is_second ? 0.5 : 0.1) ? -1.0 : 1.0;
    return sign * std::ldexp(1.0 + r.uniform(), static_cast<int>(r.between(-12, 1)));
}

void write_number(Random& r, int32_t type, bool is_second, bool is_zero, bool is_whole, uint8_t* to) {
    const double value = choose_number(r, type, is_second, is_zero, is_whole);
    int64_t bits;
    switch (type) {
    case Q4_F32:
    case Q4_BF16:
    case Q4_F16: encode(type, round_to(type, value), to); return;
    case Q4_E4M3: bits = is_whole ? r.between(5, 9) << 3 : r.between(0, 126) | (r.chance(0.1) ? 128 : 0); break;
    case Q4_E8M0: bits = is_whole ? r.between(125, 129) : !is_second && r.chance(0.02) ? r.of<int64_t>({0, 1, 246}) : r.between(112, 133); break;
    case Q4_LOW_U4:
    case Q4_HIGH_U4: bits = r.between(0, is_whole ? 12 : 15); break;
    case Q4_U8: bits = is_whole ? r.between(0, 12) : is_zero ? r.between(0, 15) : r.between(0, 255); break;
    case Q4_I8: bits = is_whole ? r.between(0, 12) : is_zero ? r.between(-8, 15) : r.between(-128, 127); break;
    default: bits = is_whole || is_zero ? r.between(0, 15) : r.between(-(1 << 20), 1 << 20);
    }
    if (is_whole && !is_second && type >= Q4_U8) bits = 1 << r.between(0, 2);
    const auto narrow = static_cast<int32_t>(bits);
    std::memcpy(to, &narrow, static_cast<size_t>(width(type)));
}

const uint8_t* place_numbers(Random& r, Memory& memory, const Case& c, bool is_second, int64_t& row, int64_t& block) {
    const q4_matrix& m = c.matrix;
    const int32_t type = is_second ? m.second_type : m.scale_type;
    const int64_t size = width(type);
    const bool is_plain = r.chance(0.4);
    const auto [span, origin] = lay_out(r, {{c.blocks, &block, true}, {m.rows, &row, true}}, size, is_plain, r.chance(0.5) ? 1 : size);
    uint8_t* start = memory.take(span, r.between(0, 3), r.chance(0.2)) + origin;
    for (int64_t n = 0; n < m.rows; ++n)
        for (int64_t b = 0; b < c.blocks; ++b)
            write_number(r, type, is_second, is_second && m.second == Q4_ZERO && m.bits == 4, c.is_whole, start + n * row + b * block);
    return start;
}

// A float16 for each super-block.
const uint8_t* place_supers(Random& r, Memory& memory, const Case& c, bool is_second, int64_t& step) {
    const int64_t count = c.matrix.rows * c.blocks / c.matrix.super_blocks;
    const auto [span, origin] = lay_out(r, {{count, &step, true}}, 2, r.chance(0.4), r.chance(0.5) ? 1 : 2);
    uint8_t* start = memory.take(span, r.between(0, 3), r.chance(0.2)) + origin;
    for (int64_t i = 0; i < count; ++i) write_number(r, Q4_F16, is_second, false, c.is_whole, start + i * step);
    return start;
}

void choose_source(Random& r, Memory& memory, Case& c) {
    const q4_matrix& m = c.matrix;
    q4_source& s = c.source;
    s.order = m.bits == 8 ? Q4_BYTES : r.of<int32_t>({Q4_LOW_FIRST, Q4_HIGH_FIRST, Q4_HALF_SPLIT});
    s.half = s.order == Q4_HALF_SPLIT ? r.of<int32_t>({16, 16, 1, 8, 32, 64, 5}) : 0;
    const int64_t bytes = m.bits == 8       ? m.columns
                          : s.half ? ceil_div(m.columns, 2 * s.half) * s.half
                                            : ceil_div(m.columns, 2);
    s.group_bytes = r.chance(0.5) ? bytes : s.half && r.chance(0.7) ? s.half : r.between(1, bytes);
    if (s.group_bytes == bytes && r.chance(0.1)) s.group_bytes += r.between(1, 9);  // one group, not filled
    const int64_t used = std::min(bytes, s.group_bytes);
    const auto [span, origin] = lay_out(
        r, {{used, &s.code_byte, true}, {ceil_div(bytes, s.group_bytes), &s.code_group, true}, {m.rows, &s.code_row, true}}, 1,
        r.chance(0.4), 1);
    uint8_t* codes = memory.take(span, r.between(0, 3), r.chance(0.2));
    const bool is_one_code = c.is_extreme || r.chance(0.1);
    const int64_t highest = std::max_element(m.level, m.level + 16) - m.level;
    const auto code = static_cast<uint64_t>((c.is_extreme ? highest : r.between(0, 15)) * 17);
    for (int64_t i = 0; i < span; ++i) codes[i] = static_cast<uint8_t>(is_one_code ? code : r.next());
    if (m.held_bits != m.bits) {  // all levels, or one of the ends
        const int count = 1 << m.held_bits, one = r.chance(0.5) ? 0 : count - 1;
        const auto held = [&](int code) { return m.first + (is_one_code ? one : code % count); };
        for (int64_t i = 0; i < span; ++i)
            codes[i] = static_cast<uint8_t>(m.bits == 8 ? held(codes[i]) - (m.is_unsigned ? 0 : 128) : held(codes[i] & 15) | held(codes[i] >> 4) << 4);
    }
    s.codes = codes + origin;
    s.scale = place_numbers(r, memory, c, false, s.scale_row, s.scale_block);
    if (m.super_blocks) s.super_scale = place_supers(r, memory, c, false, s.super_scale_step);
    if (m.second == Q4_NONE) return;
    if (m.super_blocks) s.super_second = place_supers(r, memory, c, true, s.super_second_step);
    s.second = place_numbers(r, memory, c, true, s.second_row, s.second_block);
    if (m.second != Q4_OFFSET || m.second_type != Q4_F32 || c.is_whole || !r.chance(0.3)) return;
    // Offsets that take a code's value away, all but what rounding leaves: a weight rounded twice would be zero there.
    for (int64_t n = 0; n < m.rows; ++n)
        for (int64_t b = 0; b < c.blocks; ++b) {
            const uint8_t code = c.code(n, b * m.block);
            const double value = m.bits == 8 ? c.byte_value(code) : static_cast<double>(m.codebook[code]);
            encode(Q4_F32, -value * decode(m.scale_type, c.number_at(false, n, b)), c.number_at(true, n, b));
        }
}

// -- the call

void fill_row(Random& r, const Case& c, double* x) {
    const int64_t columns = c.matrix.columns;
    const auto type = c.call.x_type;
    const bool is_grid = c.is_whole || r.chance(0.4);
    // Whole numbers times a power of two, ±127 in every 32 (int16: ±16383): integers hold them as they are. All of them at an
    // end, sums are the largest there can be; halves are ties.
    const int64_t top = c.call.family == Q4_A16 && type == Q4_F32 ? 16383 : 127;
    const bool is_end = is_grid && r.chance(c.is_extreme ? 0.7 : 0.1), has_ties = is_grid && !c.is_whole && r.chance(0.3);
    const int exponent = static_cast<int>(r.between(-9, 3));
    for (int64_t first = 0; first < columns; first += 32) {
        const int64_t last = std::min(columns, first + 32), peak = r.between(first, last - 1);
        const int64_t most = r.of<int64_t>({1, top});
        const double size = std::ldexp(1.0, static_cast<int>(r.between(-4, 4)));
        for (int64_t k = first; k < last; ++k) {
            if (is_end)
                x[k] = std::ldexp(static_cast<double>(first % 64 ? -top : top), exponent);
            else if (has_ties && k != peak)
                x[k] = std::ldexp(static_cast<double>(r.between(2 - 2 * top, 2 * top - 2)), exponent - 1);
            else if (is_grid)
                x[k] = std::ldexp(static_cast<double>(k == peak ? r.of<int64_t>({-top, top}) : r.between(-most, most)), exponent);
            else
                x[k] = r.chance(0.05) ? 0.0 : r.bell() * size;
        }
        if (!c.is_whole && r.chance(0.03)) std::fill(x + first, x + last, 0.0);
    }
    if (!c.is_whole && r.chance(0.2))  // outliers, in one block or in many
        for (int64_t count = r.chance(0.1) ? columns / 4 : r.between(1, 12); count > 0; --count)
            x[r.between(0, columns - 1)] *= std::ldexp(1.0, static_cast<int>(r.between(3, type == Q4_F16 ? 8 : 24)));
    if (!c.is_whole && r.chance(0.1)) {
        const bool is_half = type == Q4_F16;
        const double infinity = std::numeric_limits<double>::infinity();
        const double special = r.of({0.0, infinity, -infinity, std::numeric_limits<double>::quiet_NaN(),
                                     is_half ? 65504.0 : 3e38, is_half ? 3e4 : 1e33, is_half ? 6e-8 : 1e-44,
                                     is_half ? 6e-8 : 1e-38, is_half ? -1e-6 : 1e-37});
        if (special == 0.0 || std::fabs(special) < 1e-3) std::fill(x, x + columns, 0.0);
        for (int64_t count = r.between(1, 3); count > 0; --count) x[r.between(0, columns - 1)] = special;
    }
    for (int64_t k = 0; k < columns; ++k) x[k] = round_to(type, x[k]);
}

// Another order of x, or factors; powers of two, so that grids stay grids, or any.
void choose_inputs(Random& r, Memory& memory, Case& c) {
    const int64_t columns = c.matrix.columns;
    q4_inputs& in = c.call.inputs;
    if (r.chance(0.7)) {
        auto* order = reinterpret_cast<int64_t*>(memory.take(columns * 8, 8 * r.between(0, 3), r.chance(0.2)));
        for (int64_t k = 0; k < columns; ++k) order[k] = k;
        for (int64_t k = columns; k > 1; --k) std::swap(order[k - 1], order[r.between(0, k - 1)]);
        if (r.chance(0.1)) order[r.between(0, columns - 1)] = r.of<int64_t>({-1, 0, columns, INT64_MIN, INT64_MAX});
        in.order = order;
    }
    if (in.order && r.chance(0.5)) return;
    in.factor_type = r.of<int32_t>({Q4_F32, Q4_F32, Q4_BF16, Q4_F16});
    const int64_t size = width(in.factor_type);
    uint8_t* factor = memory.take(columns * size, size * r.between(0, 3), r.chance(0.2));
    const bool is_fine = !c.is_whole && r.chance(0.5);
    for (int64_t k = 0; k < columns; ++k) {
        const double value = std::ldexp(is_fine ? 1.0 + r.uniform() : 1.0, static_cast<int>(r.between(-2, 2)));
        encode(in.factor_type, round_to(in.factor_type, r.chance(0.1) ? -value : value), factor + k * size);
    }
    in.factor = factor;
}

// Write a row of x so that the stored columns meet those numbers, or nearly so.
void write_row(const Case& c, const std::vector<double>& row, uint8_t* x) {
    const q4_inputs& in = c.call.inputs;
    const int32_t type = c.call.x_type;
    for (int64_t k = 0; k < c.matrix.columns; ++k) {
        const int64_t place = in.order ? in.order[k] : k;
        if (place < 0 || place >= c.matrix.columns) continue;
        double value = row[static_cast<size_t>(k)];
        if (in.factor) value /= decode(in.factor_type, static_cast<const uint8_t*>(in.factor) + place * width(in.factor_type));
        value = round_to(type, value);
        // Next to infinities, finite sums may overflow: what is finite stays so.
        if (std::isinf(value) && std::isfinite(row[static_cast<size_t>(k)])) value = std::copysign(1.0, value);
        encode(type, value, x + place * width(type));
    }
}

void choose_call(Random& r, Memory& memory, Case& c, const Sizes& sizes) {
    const q4_matrix& m = c.matrix;
    q4_call& call = c.call;
    const int64_t work = m.rows * m.columns;
    int64_t rows = r.chance(0.4) ? r.between(1, 3) : r.between(1, r.chance(0.2) ? 40 : 18);
    const bool is_many = sizes.has_large && r.chance(0.04);  // kernels for many rows of x begin at up to 48
    if (is_many) rows = r.between(41, 130);
    const int64_t most = is_many ? 1 << 20 : 1 << 18;
    if (work * rows > most) rows = std::max<int64_t>(r.between(2, 9), most / work);
    if (m.columns > 5000) rows = r.between(1, 64);
    call.x_rows = rows;
    call.x_type = r.of<int32_t>({Q4_F32, Q4_F32, Q4_BF16, Q4_F16});
    call.y_type = r.chance(0.7) ? call.x_type : r.of<int32_t>({Q4_F32, Q4_BF16, Q4_F16});
    call.family = r.of<int32_t>({Q4_EXACT, Q4_A8, Q4_A8, Q4_A16, Q4_A16});
    call.threads = r.of<int32_t>({1, 1, 2, 2, 2, 2, 2, 3});
    call.global_divides = r.chance(0.5);

    const int64_t x_size = width(call.x_type), y_size = width(call.y_type);
    int64_t stride;
    int64_t span = 0, origin = 0;
    const auto place = [&](int64_t columns, int64_t size, bool may_repeat) {
        std::tie(span, origin) = lay_out(r, {{rows, &stride, may_repeat}}, columns * size, r.chance(0.4), size);
        return memory.take(span, r.between(0, 3) * size, r.chance(0.2)) + origin;
    };
    if (r.chance(0.2)) choose_inputs(r, memory, c);
    uint8_t* x = place(m.columns, x_size, true);
    call.x = x, call.x_stride = stride / x_size;
    std::vector<double> row(static_cast<size_t>(m.columns));
    for (int64_t i = 0; i < rows; ++i) {
        fill_row(r, c, row.data());
        write_row(c, row, x + i * stride);
    }
    call.y = place(m.rows, y_size, false);
    call.y_stride = stride / y_size;
    c.y_start = static_cast<uint8_t*>(call.y) - origin, c.y_bytes = span;

    if (r.chance(0.4)) {
        const bool is_each = r.chance(0.5);
        call.global_count = is_each ? m.rows : 1;
        uint8_t* global = memory.take(call.global_count * 4, 4 * r.between(0, 3), r.chance(0.2));
        for (int64_t n = 0; n < call.global_count; ++n) {
            const double value = std::ldexp(1.0 + (c.is_whole ? 0.0 : r.uniform()), static_cast<int>(r.between(-6, 6)));
            encode(Q4_F32, round_to(Q4_F32, value), global + 4 * n);
        }
        call.global_scale = reinterpret_cast<const float*>(global);
    }
    if (r.chance(0.4)) {
        uint8_t* bias = memory.take(m.rows * y_size, y_size * r.between(0, 3), r.chance(0.2));
        for (int64_t n = 0; n < m.rows; ++n) encode(call.y_type, round_to(call.y_type, r.bell() * 4), bias + n * y_size);
        call.bias = bias;
    }
}

const char* type_name(int32_t type) {
    static const char* const names[] = {"f32", "bf16", "f16", "e4m3", "e8m0", "u8", "i8", "i32", "low", "high"};
    return names[type];
}

}  // namespace

uint8_t* Case::code_at(int64_t n, int64_t k) const {
    const int64_t half = source.half;
    const int64_t byte = matrix.bits == 8 ? k : source.order == Q4_HALF_SPLIT ? k / (2 * half) * half + k % half : k / 2;
    const int64_t at = n * source.code_row + byte / source.group_bytes * source.code_group +
                       byte % source.group_bytes * source.code_byte;
    return const_cast<uint8_t*>(source.codes) + at;
}

uint8_t Case::code(int64_t n, int64_t k) const {
    const uint8_t byte = *code_at(n, k);
    if (matrix.bits == 8) return byte;
    const bool is_high = source.order == Q4_LOW_FIRST    ? k % 2 == 1
                         : source.order == Q4_HIGH_FIRST ? k % 2 == 0
                                                         : k / source.half % 2 == 1;
    return is_high ? byte >> 4 : byte & 15;
}

uint8_t* Case::number_at(bool is_second, int64_t n, int64_t block) const {
    if (is_second) return const_cast<uint8_t*>(source.second) + n * source.second_row + block * source.second_block;
    return const_cast<uint8_t*>(source.scale) + n * source.scale_row + block * source.scale_block;
}

double Case::byte_value(uint8_t code) const {
    const int level = matrix.is_unsigned ? code : static_cast<int8_t>(code) + 128;
    return static_cast<double>(level) - static_cast<double>(matrix.center);
}

double Case::super_number(bool is_second, int64_t n, int64_t block) const {
    if (!matrix.super_blocks) return 1.0;
    const int64_t place = (n * blocks + block) / matrix.super_blocks;
    return decode(Q4_F16, is_second ? source.super_second + place * source.super_second_step
                                    : source.super_scale + place * source.super_scale_step);
}

void* Case::y_at(int64_t m, int64_t n) const {
    return static_cast<uint8_t*>(call.y) + (m * call.y_stride + n) * width(call.y_type);
}

void Case::read_source() {
    codes.clear(), scale.clear(), second.clear(), scale_bytes.clear(), second_bytes.clear();
    for (int64_t n = 0; n < matrix.rows; ++n) {
        for (int64_t k = 0; k < matrix.columns; ++k) codes.push_back(code(n, k));
        for (const bool is_second : {false, true}) {
            if (is_second && matrix.second == Q4_NONE) continue;
            const int32_t type = is_second ? matrix.second_type : matrix.scale_type;
            for (int64_t b = 0; b < blocks; ++b) {
                const uint8_t* from = number_at(is_second, n, b);
                (is_second ? second : scale).push_back(decode(type, from) * super_number(is_second, n, b));
                auto& bytes = is_second ? second_bytes : scale_bytes;
                bytes.insert(bytes.end(), from, from + width(type));
            }
        }
    }
}

double Case::input(int64_t i, int64_t k) const {
    const q4_inputs& in = call.inputs;
    const int64_t place = in.order ? in.order[k] : k;
    if (place < 0 || place >= matrix.columns) return 0.0;
    const double value = decode(call.x_type, static_cast<const uint8_t*>(call.x) + (i * call.x_stride + place) * width(call.x_type));
    if (!in.factor) return value;
    const auto* factor = static_cast<const uint8_t*>(in.factor) + place * width(in.factor_type);
    return round_to(Q4_F32, value * decode(in.factor_type, factor));
}

void Case::read_call() {
    x.clear(), global.clear(), bias.clear();
    const int64_t y_size = width(call.y_type);
    for (int64_t i = 0; i < call.x_rows; ++i)
        for (int64_t k = 0; k < matrix.columns; ++k)
            x.push_back(input(i, k));
    for (int64_t n = 0; n < matrix.rows; ++n) {
        if (call.global_scale) global.push_back(static_cast<double>(call.global_scale[call.global_count > 1 ? n : 0]));
        if (call.bias) bias.push_back(decode(call.y_type, static_cast<const uint8_t*>(call.bias) + n * y_size));
    }
}

std::string Case::told() const {
    char text[512];
    const char* const families[] = {"exact", "a8", "a16"};
    const char* const seconds[] = {"none", "offset", "zero"};
    const char* const orders[] = {"low_first", "high_first", "half_split", "bytes"};
    std::snprintf(text, sizeof text,
                  "M=%ld N=%ld K=%ld block=%ld super=%ld bits=%d of %d from %d%s scale=%s second=%s:%s order=%s half=%d group_bytes=%ld "
                  "codes(row %ld, group %ld, byte %ld) level0=%d center=%g step=%g family=%s x=%s:%ld y=%s:%ld threads=%d "
                  "global=%ld%s bias=%d order=%d factor=%d whole=%d",
                  static_cast<long>(call.x_rows), static_cast<long>(matrix.rows), static_cast<long>(matrix.columns),
                  static_cast<long>(matrix.block), static_cast<long>(matrix.super_blocks), matrix.held_bits, matrix.bits, matrix.first,
                  matrix.is_unsigned ? " unsigned" : "", type_name(matrix.scale_type), seconds[matrix.second],
                  type_name(matrix.second_type), orders[source.order], source.half, static_cast<long>(source.group_bytes),
                  static_cast<long>(source.code_row), static_cast<long>(source.code_group),
                  static_cast<long>(source.code_byte), matrix.level[0], static_cast<double>(matrix.center),
                  static_cast<double>(matrix.step), families[call.family], type_name(call.x_type),
                  static_cast<long>(call.x_stride), type_name(call.y_type), static_cast<long>(call.y_stride), call.threads,
                  static_cast<long>(call.global_scale ? call.global_count : 0), call.global_divides ? " divides" : "",
                  call.bias != nullptr, call.inputs.order != nullptr, call.inputs.factor != nullptr, is_whole);
    return text;
}

Case make_case(uint64_t seed, Memory& memory, const Sizes& sizes) {
    Random r(seed);
    Case c{};
    c.seed = seed;
    c.is_whole = r.chance(0.15);
    c.is_extreme = !c.is_whole && r.chance(0.05);
    choose_matrix(r, c, sizes);
    choose_source(r, memory, c);
    choose_call(r, memory, c, sizes);
    c.read_source();
    c.read_call();
    return c;
}

}  // namespace q4test
