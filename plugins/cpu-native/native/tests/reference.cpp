// The bound. Let u = 2^-24 and g(n) = n u / (1 - n u). A sum of products in which no term is rounded more than n times,
// in whatever order it is added up, errs by at most g(n) * sum |x| |w|:
//
//   exact  n = K + 16: a term meets at most one addition for each in-feature (K filled up to 32), and a few products.
//          |w| is the weight's own size: it is rounded once as a whole, however much scale * value and offset cancel.
//   a8     n = 4 chunks + 16: whatever is below a chunk of 32 is whole numbers, which are not rounded. Here scale * value
//          and offset are summed apart, so |w| is the sum of their sizes; for 8 bits code and zero are, too.
//   a16    the same: a half chunk's sum may be rounded once, as it becomes a float32.
//
// Each operation may also underflow by 2^-149, which later factors enlarge, the 2^64 of a shrunk row among them. The global
// scale, the bias and y's type round once each; y's rounding is monotone, so the ends of the interval are rounded as y is.
//
// Where all terms are multiples of one unit and their sizes add up to less than 2^24 of it, no order of summation rounds
// anything: then the bound is zero, and one wrong bit shows.
//
// Rounded activations are x = level * scale with scale = amax / peak of 32 in-features and level = x / scale to nearest, ties
// to even; peak is 127, or for int16 32766, or 16383 where a word is above 4095. Both are single float32 operations; where
// x / scale lies so near a tie that multiplying by 1 / scale may fall on the other side (never where scale is a power of
// two), one level is allowed for that in-feature.
//
// Before that, outliers are taken out of their 32: as long as at most 3 of 16 that are not 0 reach a sixteenth of the
// largest. They are multiplied exactly, and their sum is added with one rounding. Rows with a value that is not finite or
// above 2^90, a scale below the normal numbers, or more than 8 outliers and two for each 32 in-features are computed exactly.
#include "reference.hpp"

#include <algorithm>
#include <limits>

namespace q4test {
namespace {

constexpr double kUnit = 0x1p-24, kTiny = 0x1p-149, kTie = 0x1p-22;  // of a level

double gamma(double n) { return n * kUnit / (1.0 - n * kUnit); }

struct Weights {
    std::vector<double> value, size, unit;  // [N, K]: w; what bounds its rounding; lowest bit of its parts (whole cases)
    double step;                            // a factor of all sums
};

double lowest_bit(double value) {  // as a power of two
    if (value == 0.0 || !std::isfinite(value)) return std::numeric_limits<double>::infinity();
    int exponent;
    const auto bits = static_cast<int64_t>(std::ldexp(std::frexp(std::fabs(value), &exponent), 53));
    return std::ldexp(static_cast<double>(bits & -bits), exponent - 53);
}

bool is_power_of_two(double value) {
    int exponent;
    return std::frexp(std::fabs(value), &exponent) == 0.5;
}

bool has_words(const q4_matrix& m) {
    return m.bits == 4 && m.second == Q4_NONE && *std::max_element(m.level, m.level + 16) > 24;
}

double peak_of(const Case& c) {
    if (c.call.family == Q4_A8) return 127.0;
    int most = 0;
    for (const int16_t word : c.matrix.word) most = std::max<int>(most, std::abs(word));
    return has_words(c.matrix) && most > 4095 ? 16383.0 : 32766.0;
}

Weights weights_of(const Case& c, bool is_rounded) {
    const q4_matrix& m = c.matrix;
    Weights w;
    const bool is_word = is_rounded && c.call.family == Q4_A16 && has_words(m);
    w.step = is_word ? static_cast<double>(m.word_step) : is_rounded ? static_cast<double>(m.step) : 1.0;
    const auto count = static_cast<size_t>(m.rows * m.columns);
    w.value.resize(count), w.size.resize(count), w.unit.resize(c.is_whole ? count : 0);
    size_t i = 0;
    for (int64_t n = 0; n < m.rows; ++n)
        for (int64_t k = 0; k < m.columns; ++k, ++i) {
            const auto block = static_cast<size_t>(n * c.blocks + k / m.block);
            const double scale = c.scale[block], second = m.second == Q4_NONE ? 0.0 : c.second[block];
            const int code = c.codes[i];
            double plain, away = 0.0;
            if (m.bits == 8)
                plain = c.byte_value(c.codes[i]), away = m.second == Q4_ZERO ? second : 0.0;
            else if (m.second == Q4_ZERO)
                plain = code, away = second;
            else if (is_word)
                plain = m.word[code];
            else if (is_rounded)
                plain = m.level[code], away = static_cast<double>(m.center);
            else
                plain = static_cast<double>(m.codebook[code]);
            const double offset = m.second == Q4_OFFSET ? second : 0.0;
            w.value[i] = scale * (plain - away) + offset;
            w.size[i] = is_rounded ? std::fabs(scale * (plain - away)) + std::fabs(offset) : std::fabs(w.value[i]);
            if (is_rounded && m.bits == 8) w.size[i] = std::fabs(scale) * (std::fabs(plain) + std::fabs(away)) + std::fabs(offset);
            if (c.is_whole) {
                w.unit[i] = std::min({lowest_bit(scale * plain), lowest_bit(scale * away), lowest_bit(offset)});
                w.size[i] = std::fabs(scale) * (std::fabs(plain) + std::fabs(away)) + std::fabs(offset);
            }
        }
    return w;
}

struct Row {
    std::vector<double> x, slack;  // slack: what one level more or less would make
    std::vector<double> outliers;  // empty where there are none
    bool is_rounded;
};

// Take the outliers of some in-features out of a row.
int64_t take_outliers(std::vector<double>& x, std::vector<double>& outliers, int64_t first, int64_t last) {
    for (int64_t found = 0;;) {
        double most = 0.0;
        int64_t large = 0, present = 0;
        for (int64_t k = first; k < last; ++k) most = std::max(most, std::fabs(x[static_cast<size_t>(k)]));
        const auto is_large = [&](int64_t k) { return std::fabs(x[static_cast<size_t>(k)]) >= most / 16.0; };
        for (int64_t k = first; k < last; ++k) large += is_large(k), present += x[static_cast<size_t>(k)] != 0.0;
        if (most < 0x1p-122 || 16 * large > 3 * present) return found;  // below, float32 has no such sixteenth
        outliers.resize(x.size());
        for (int64_t k = first; k < last; ++k)
            if (is_large(k)) outliers[static_cast<size_t>(k)] = x[static_cast<size_t>(k)];
        for (int64_t k = first; k < last; ++k)
            if (outliers[static_cast<size_t>(k)] != 0.0) x[static_cast<size_t>(k)] = 0.0;
        found += large;
    }
}

constexpr double kHuge = 0x1p90;

Row row_of(const Case& c, int64_t i) {
    const int64_t columns = c.matrix.columns;
    const double* x = c.x.data() + i * columns;
    Row row{{x, x + columns}, std::vector<double>(static_cast<size_t>(columns)), {}, c.call.family != Q4_EXACT};
    if (!row.is_rounded) return row;
    const double most = peak_of(c);
    const auto exactly = [&] {
        row.x.assign(x, x + columns), row.is_rounded = false, row.outliers.clear();
        std::fill(row.slack.begin(), row.slack.end(), 0.0);
        return row;
    };
    int64_t found = 0;
    for (int64_t first = 0; first < columns; first += 32) {
        const int64_t last = std::min(columns, first + 32);
        double peak = 0.0;
        for (int64_t k = first; k < last; ++k) {
            if (!std::isfinite(x[k])) peak = std::numeric_limits<double>::infinity();
            peak = std::max(peak, std::fabs(x[k]));
        }
        if (peak == 0.0) continue;
        if (peak <= kHuge) {
            found += take_outliers(row.x, row.outliers, first, last);
            if (found > 2 * ((columns + 31) / 32) + 8) return exactly();
            peak = 0.0;
            for (int64_t k = first; k < last; ++k) peak = std::max(peak, std::fabs(row.x[static_cast<size_t>(k)]));
        }
        const auto scale = static_cast<double>(static_cast<float>(peak) / static_cast<float>(most));
        if (!(scale >= 0x1p-126 && peak <= kHuge)) return exactly();
        for (int64_t k = first; k < last; ++k) {
            const auto at = static_cast<size_t>(k);
            const double level = static_cast<double>(static_cast<float>(row.x[at]) / static_cast<float>(scale));
            row.x[at] = scale * std::nearbyint(level);
            const bool is_near_tie = std::fabs(level - std::floor(level) - 0.5) < kTie * most;
            if (is_near_tie && !is_power_of_two(scale)) row.slack[at] = scale;
        }
    }
    return row;
}

Interval element(const Case& c, const Row& row, const Weights& w, const Weights& exact, int64_t n, double largest_scale) {
    const int64_t columns = c.matrix.columns, filled = (columns + 31) / 32 * 32;
    const double* value = w.value.data() + n * columns;
    const double* size = w.size.data() + n * columns;
    double sum = 0.0, sizes = 0.0, slack = 0.0, peak = 0.0;
    for (int64_t k = 0; k < columns; ++k) {
        const auto at = static_cast<size_t>(k);
        sum += row.x[at] * value[k];
        if (!std::isfinite(row.x[at])) continue;
        sizes += std::fabs(row.x[at]) * size[k];
        slack += row.slack[at] * size[k];
        peak = std::max(peak, std::fabs(row.x[at]));
    }
    const int32_t type = c.call.y_type;
    if (std::isnan(sum)) return {Interval::NOT_A_NUMBER, 0.0, 0.0};
    // Sums of levels before their scale, and of scaled ones before step and global scale, may pass float32's end: a level
    // and what it is taken from are below 512, words below 2^13, and whole sums are scaled chunk by chunk, by x's scale or the
    // weight's first.
    const double growth = peak > kHuge ? 0x1p64 : 1.0;  // such rows are shrunk before they are multiplied
    const double held = peak / growth;
    const double largest_level = c.call.family == Q4_A16 && has_words(c.matrix) ? 8192.0 : 512.0;
    const double unscaled = held * largest_level * (row.is_rounded ? 32.0 : static_cast<double>(filled));
    const double levels = row.is_rounded ? largest_scale * largest_level * peak_of(c) * 32.0 : 0.0;
    if (std::max({sizes, sizes * w.step, unscaled, levels}) > 0x1p126) return {Interval::ANYTHING, 0.0, 0.0};
    bool is_exact = c.is_whole && slack == 0.0;
    if (is_exact) {
        double unit = std::numeric_limits<double>::infinity();
        for (int64_t k = 0; k < columns; ++k)
            if (row.x[static_cast<size_t>(k)] != 0.0)
                unit = std::min(unit, lowest_bit(row.x[static_cast<size_t>(k)]) * w.unit[static_cast<size_t>(n * columns + k)]);
        is_exact = sizes <= 0x1p24 * unit;
    }
    const double terms = row.is_rounded ? 4.0 * static_cast<double>(filled / 32) + 16.0 : static_cast<double>(filled) + 16.0;
    double beside = 0.0, beside_sizes = 0.0;
    for (int64_t k = 0; k < (row.outliers.empty() ? 0 : columns); ++k) {
        const double term = row.outliers[static_cast<size_t>(k)] * exact.value[static_cast<size_t>(n * columns + k)];
        beside += term, beside_sizes += std::fabs(term);
    }
    if (beside_sizes > 0x1p126) return {Interval::ANYTHING, 0.0, 0.0};
    double y = sum * w.step;
    double error = 0.0;
    if (!is_exact && std::isfinite(sum))
        error = (gamma(terms) * (sizes + slack) + slack + terms * kTiny * growth * std::max(1.0, largest_scale)) * std::fabs(w.step);
    const auto rounded = [&](double factor) { error = error * factor + kUnit * (std::fabs(y) + error) + kTiny; };
    if (!is_power_of_two(w.step)) rounded(1.0);
    if (!row.outliers.empty()) {
        y += beside;
        rounded(1.0);
    }
    if (c.call.global_scale) {
        const double global = c.global[static_cast<size_t>(n)];
        const double factor = c.call.global_divides ? 1.0 / global : global;
        y = c.call.global_divides ? y / global : y * global;
        if (is_power_of_two(factor))
            error *= std::fabs(factor);
        else
            rounded(std::fabs(factor) * (1.0 + 0x1p-50));
    }
    if (c.call.bias) {
        y += c.bias[static_cast<size_t>(n)];
        rounded(1.0);
    }
    if (!std::isfinite(y)) return {std::isnan(y) ? Interval::NOT_A_NUMBER : Interval::BETWEEN, y, y};
    error += 0x1p-44 * (sizes * w.step + beside_sizes + std::fabs(y)) * (is_exact ? 0.0 : 1.0);  // of this float64 sum itself
    return {Interval::BETWEEN, round_to(type, round_to(Q4_F32, y - error)), round_to(type, round_to(Q4_F32, y + error))};
}

}  // namespace

std::vector<Interval> expected(const Case& c) {
    const q4_matrix& m = c.matrix;
    std::vector<Interval> out;
    out.reserve(static_cast<size_t>(c.call.x_rows * m.rows));
    Weights weights[2];
    for (int64_t i = 0; i < c.call.x_rows; ++i) {
        const Row row = row_of(c, i);
        Weights& w = weights[row.is_rounded];
        if (w.value.empty()) w = weights_of(c, row.is_rounded);
        if (!row.outliers.empty() && weights[0].value.empty()) weights[0] = weights_of(c, false);
        for (int64_t n = 0; n < m.rows; ++n) {
            double largest = 0.0;
            for (int64_t b = 0; b < c.blocks; ++b) largest = std::max(largest, std::fabs(c.scale[static_cast<size_t>(n * c.blocks + b)]));
            out.push_back(element(c, row, w, weights[0], n, largest));
        }
    }
    return out;
}

}  // namespace q4test
