#include "check.hpp"

#include <algorithm>
#include <cstdio>

namespace q4test {
namespace {

std::string say(const char* format, double a, double b, double c, double d, double e) {
    char text[256];
    std::snprintf(text, sizeof text, format, a, b, c, d, e);
    return text;
}

// Run a call on y filled with a mark; returns y's elements [rows, N], or what else was written.
std::string run(const Case& c, const q4_call& call, int32_t isa, uint8_t mark, std::vector<uint8_t>& bits,
                const std::function<void()>& after_call) {
    std::memset(c.y_start, mark, static_cast<size_t>(c.y_bytes));
    const int32_t status = q4_cpu_linear(&c.matrix, &call, isa);
    if (status != 0) return "q4_cpu_linear returned " + std::to_string(status);
    if (after_call) after_call();
    const int64_t size = width(call.y_type), row = c.matrix.rows * size;
    bits.resize(static_cast<size_t>(call.x_rows * row));
    for (int64_t i = 0; i < call.x_rows; ++i) {
        uint8_t* from = static_cast<uint8_t*>(call.y) + i * call.y_stride * size;
        std::memcpy(bits.data() + i * row, from, static_cast<size_t>(row));
        std::memset(from, mark, static_cast<size_t>(row));
    }
    for (int64_t i = 0; i < c.y_bytes; ++i)
        if (c.y_start[i] != mark) return "bytes between the rows of y were written";
    return {};
}

}  // namespace

std::vector<Isa> isas(int32_t state) {
    std::vector<Isa> out;
    for (int32_t number = 1; const char* name = q4_cpu_isa_name(number); ++number)
        if (q4_cpu_has_isa(number) == state) out.push_back({name, number});
    return out;
}

std::string check_pack(const Case& c, Memory& memory, uint8_t*& tiles) {
    Random r(c.seed ^ 0x7461);
    const int64_t bytes = q4_cpu_prepared_bytes(&c.matrix);
    if (bytes <= 0) return "q4_cpu_prepared_bytes returned " + std::to_string(bytes);
    tiles = memory.take(bytes, r.of<int64_t>({0, 0, 1, 16}), r.chance(0.2));
    if (q4_cpu_pack(&c.matrix, &c.source, tiles, c.call.threads) != 0) return "q4_cpu_pack failed";
    if (!r.chance(0.25)) return {};
    uint8_t* again = memory.take(bytes);
    std::memset(again, 0x11, static_cast<size_t>(bytes));
    if (q4_cpu_pack(&c.matrix, &c.source, again, r.of<int32_t>({1, 2, 2, 3})) != 0) return "q4_cpu_pack failed";
    if (std::memcmp(tiles, again, static_cast<size_t>(bytes)) != 0) return "the tiles depend on threads, or are not filled";
    return {};
}

std::string check_unpack(const Case& c, Memory& memory, const uint8_t* tiles) {
    const q4_matrix& m = c.matrix;
    Random r(c.seed ^ 0x756e);
    std::vector<int64_t> rows;
    const bool is_all = r.chance(0.5);
    for (int64_t n = 0; n < m.rows; ++n) rows.push_back(is_all ? n : r.between(0, m.rows - 1));
    if (!is_all) rows.resize(static_cast<size_t>(r.between(1, m.rows)));
    const auto count = static_cast<int64_t>(rows.size());
    const int64_t scale_row = c.blocks * width(m.scale_type), second_row = c.blocks * width(m.second_type);
    uint8_t* codes = memory.take(count * m.columns);
    uint8_t* scale = memory.take(count * scale_row, r.between(0, 3));
    uint8_t* second = m.second == Q4_NONE ? nullptr : memory.take(count * second_row, r.between(0, 3));
    const auto threads = r.of<int32_t>({1, 2, 2, 3});
    if (q4_cpu_unpack(&m, tiles, is_all ? nullptr : rows.data(), count, codes, scale, second, threads) != 0)
        return "q4_cpu_unpack failed";
    for (int64_t i = 0; i < count; ++i) {
        const int64_t n = rows[static_cast<size_t>(i)];
        if (!std::equal(codes + i * m.columns, codes + (i + 1) * m.columns, c.codes.begin() + n * m.columns))
            return "codes did not come back in row " + std::to_string(n);
        if (!std::equal(scale + i * scale_row, scale + (i + 1) * scale_row, c.scale_bytes.begin() + n * scale_row))
            return "scales did not come back in row " + std::to_string(n);
        if (second && !std::equal(second + i * second_row, second + (i + 1) * second_row, c.second_bytes.begin() + n * second_row))
            return "second numbers did not come back in row " + std::to_string(n);
    }
    return {};
}

std::string check_linear(const Case& c, Memory& memory, const uint8_t* tiles, const Isa& isa,
                         const std::vector<Interval>& intervals, const std::function<void()>& after_call) {
    const q4_matrix& m = c.matrix;
    Random r(c.seed ^ 0x6c69);
    q4_call call = c.call;
    call.tiles = tiles;
    std::vector<uint8_t> bits, others;
    std::string wrong = run(c, call, isa.number, 0xa7, bits, after_call);
    if (!wrong.empty()) return wrong;
    if (!memory.is_untouched()) return "bytes around a buffer were written";
    const int64_t size = width(call.y_type), row = m.rows * size;
    for (int64_t i = 0; i < call.x_rows * m.rows; ++i) {
        const Interval& wanted = intervals[static_cast<size_t>(i)];
        const double y = decode(call.y_type, bits.data() + i * size);
        if (wanted.holds(y)) continue;
        if (wanted.kind == Interval::NOT_A_NUMBER)
            return say("y[%.0f, %.0f] = %.9g must be NaN", static_cast<double>(i / m.rows), static_cast<double>(i % m.rows), y, 0, 0);
        return say("y[%.0f, %.0f] = %.9g must be between %.9g and %.9g", static_cast<double>(i / m.rows),
                   static_cast<double>(i % m.rows), y, wanted.low, wanted.high);
    }
    if (after_call || !r.chance(0.3)) return {};
    call.threads = r.of<int32_t>({1, 1, 2, 3});
    wrong = run(c, call, isa.number, 0x5b, others, {});
    if (!wrong.empty()) return wrong;
    if (bits != others) return "other bits with " + std::to_string(call.threads) + " threads";
    // Some of the rows, at a place of their own among the passes.
    const int64_t first = r.between(0, call.x_rows - 1);
    q4_call part = call;
    part.x_rows = r.chance(0.5) ? 1 : r.between(1, call.x_rows - first);
    part.x = static_cast<const uint8_t*>(call.x) + first * call.x_stride * width(call.x_type);
    part.y = static_cast<uint8_t*>(call.y) + first * call.y_stride * size;
    wrong = run(c, part, isa.number, 0xa7, others, {});
    if (!wrong.empty()) return wrong;
    if (!std::equal(others.begin(), others.end(), bits.begin() + first * row))
        return "other bits for rows " + std::to_string(first) + " … without the rest";
    return {};
}

}  // namespace q4test
