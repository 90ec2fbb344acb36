// `program` and `program-guard`: random programs. Each step alone is compared with float64 (products: with q4_cpu_linear, bit
// for bit), and the whole program, for several numbers of threads, with its steps run one after another, bit for bit.
#include "programs.hpp"

#include <cstdio>

#include "commands.hpp"

namespace q4test {
namespace {

constexpr double kUnit = 0x1p-24, kTiny = 0x1p-120;
constexpr double kFunction = 1e-6;  // what exp and its relatives may err by

using Row = std::vector<double>;

Row doubles(const q4_view& v, int64_t row) {
    const float* from = static_cast<const float*>(v.data) + row * v.stride;
    return Row(from, from + v.columns);
}

double sum_of(const Row& row) {
    double sum = 0.0;
    for (const double value : row) sum += value;
    return sum;
}

// What one row of a step may be: value and how far away.
struct Allowed {
    Row value, error;
    void add(double v, double e) { value.push_back(v), error.push_back(e); }
};

double true_activation(int32_t op, double x) {
    switch (op) {
    case Q4_RELU: return x < 0.0 ? 0.0 : x;
    case Q4_GELU: return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Q4_GELU_TANH: return x / (1.0 + std::exp(-2.0 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Q4_SILU: return x / (1.0 + std::exp(-x));
    case Q4_SIGMOID: return 1.0 / (1.0 + std::exp(-x));
    default: return std::tanh(x);
    }
}

// Softmax of numbers that are known to within `error`: the weights, and how far each is off as a share of itself.
double softmax_of(const Row& x, double error, Row& weights) {
    const double peak = *std::max_element(x.begin(), x.end());
    double sum = 0.0, away = 0.0;
    weights.clear();
    for (const double value : x) weights.push_back(std::exp(value - peak)), sum += weights.back(), away = std::max(away, peak - value);
    for (double& weight : weights) weight /= sum;
    return 2.0 * std::expm1(error + kUnit * std::min(away, 110.0)) + 2.0 * kFunction + (static_cast<double>(x.size()) + 8.0) * kUnit;
}

Allowed attention(const q4_step& s, int64_t r, int64_t position) {
    const Row query = doubles(s.inputs[0], r);
    const auto kv_heads = static_cast<int64_t>(s.numbers[0]), window = static_cast<int64_t>(s.numbers[2]);
    const int64_t heads = s.inputs[0].rows / s.inputs[3].columns;
    const int64_t capacity = s.inputs[1].rows / kv_heads, head = r % heads / (heads / kv_heads) * capacity;
    Row scores;
    double error = 0.0;
    std::vector<Row> values;
    for (int64_t i = window ? std::max<int64_t>(0, position + 1 - window) : 0; i <= position; ++i) {
        const Row key = doubles(s.inputs[1], head + i);
        double sum = 0.0, size = 0.0;
        for (size_t c = 0; c < key.size(); ++c) sum += query[c] * key[c], size += std::fabs(query[c] * key[c]);
        scores.push_back(sum * s.numbers[1]);
        error = std::max(error, std::fabs(s.numbers[1]) * size * static_cast<double>(key.size() + 8) * kUnit);
        values.push_back(doubles(s.inputs[2], head + i));
    }
    Row weights;
    const double share = softmax_of(scores, error, weights);
    Allowed out;
    for (size_t c = 0; c < query.size(); ++c) {
        double sum = 0.0, size = 0.0;
        for (size_t i = 0; i < values.size(); ++i) sum += weights[i] * values[i][c], size += weights[i] * std::fabs(values[i][c]);
        out.add(sum, size * (share + static_cast<double>(values.size() + 8) * kUnit) + kTiny);
    }
    return out;
}

// Head by head, as attention of one query to a cache that begins with its span.
Allowed attention_of_spans(const q4_step& s, int64_t r) {
    const auto heads = static_cast<int64_t>(s.numbers[0]), kv_heads = static_cast<int64_t>(s.numbers[1]);
    const int64_t columns = s.inputs[0].columns / heads;
    const int64_t* span = static_cast<const int64_t*>(s.inputs[3].data) + 2 * r;
    Allowed out;
    for (int64_t head = 0; head < heads; ++head) {
        const auto part = [&](const q4_view& v, int64_t row, int64_t rows, int64_t place) {
            return q4_view{static_cast<float*>(v.data) + row * v.stride + place * columns, rows, columns, v.stride};
        };
        q4_step one = s;
        one.inputs[0] = part(s.inputs[0], r, 1, head), one.inputs[3].columns = 1;
        for (int i = 1; i < 3; ++i) one.inputs[i] = part(s.inputs[i], span[0], span[1] - span[0], head / (heads / kv_heads));
        one.numbers[0] = 1.0, one.numbers[1] = s.numbers[2], one.numbers[2] = 0.0;
        const Allowed own = attention(one, 0, span[1] - span[0] - 1);
        for (size_t c = 0; c < own.value.size(); ++c) out.add(own.value[c], own.error[c]);
    }
    return out;
}

Allowed mean_of_spans(const q4_step& s, int64_t r) {
    const int64_t* span = static_cast<const int64_t*>(s.inputs[1].data) + 2 * r;
    const auto count = static_cast<double>(span[1] - span[0]);
    Row sum(static_cast<size_t>(s.outputs[0].columns)), size(sum.size());
    for (int64_t i = span[0]; i < span[1]; ++i) {
        const Row row = doubles(s.inputs[0], i);
        for (size_t c = 0; c < sum.size(); ++c) sum[c] += row[c], size[c] += std::fabs(row[c]);
    }
    Allowed out;
    for (size_t c = 0; c < sum.size(); ++c) out.add(sum[c] / count, size[c] > 1e37 ? INFINITY : size[c] / count * (count + 4.0) * kUnit + kTiny);
    return out;
}

Allowed norm(const q4_step& s, int64_t r) {
    const Row x = doubles(s.inputs[0], r), weight = doubles(s.inputs[1], 0);
    const auto length = static_cast<double>(x.size());
    const bool is_rms = s.op == Q4_RMS_NORM;
    const double mean = is_rms ? 0.0 : sum_of(x) / length, eps = static_cast<float>(s.numbers[0]);
    double variance = 0.0, size = 0.0;
    for (const double value : x) variance += (value - mean) * (value - mean) / length, size += std::fabs(value) / length;
    const double shift = is_rms ? 0.0 : (length + 4.0) * kUnit * size;  // how far the mean may be off
    const double share = (length + 12.0) * kUnit + shift * shift / (variance + eps);
    Allowed out;
    for (size_t c = 0; c < x.size(); ++c) {
        const double factor = 1.0 / std::sqrt(variance + eps), w = weight[c] + (is_rms ? s.numbers[1] : 0.0);
        const double b = is_rms ? 0.0 : doubles(s.inputs[2], 0)[c], y = (x[c] - mean) * factor * w;
        const bool may_overflow = variance * length > 1e37;  // squares are of float32
        out.add(y + b, may_overflow ? INFINITY : std::fabs(y) * share + std::fabs(w) * factor * (shift + kUnit * std::fabs(mean)) * 2.0 +
                           kUnit * (std::fabs(y) + std::fabs(b)) * 4.0 + kTiny);
    }
    return out;
}

// One row of what a step gives, of an operation that has one output of float32.
Allowed allowed(const q4_step& s, const Layer* layer, int64_t r, int64_t index) {
    const q4_view &x = s.inputs[0], &y = s.outputs[0], &other = s.inputs[1];
    Allowed out;
    switch (s.op) {
    case Q4_EMBEDDING: {
        if (!layer) {
            for (const double value : doubles(other, index)) out.add(value, 0.0);
            return out;
        }
        for (int64_t k = 0; k < y.columns; ++k) out.add(static_cast<double>(layer->decoded(index, k)), 0.0);
        return out;
    }
    case Q4_LINEAR: {
        const Row in = doubles(x, r);
        for (int64_t n = 0; n < y.columns; ++n) {
            const Row weight = doubles(other, n);
            double sum = 0.0, size = 0.0;
            for (size_t k = 0; k < in.size(); ++k) sum += in[k] * weight[k], size += std::fabs(in[k] * weight[k]);
            const double bias = s.numbers[0] == 1.0 ? doubles(s.inputs[2], 0)[static_cast<size_t>(n)] : 0.0;
            out.add(sum + bias, size > 1e37 ? INFINITY : size * static_cast<double>(in.size() + 8) * kUnit + std::fabs(sum + bias) * 2.0 * kUnit + kTiny);
        }
        return out;
    }
    case Q4_RMS_NORM:
    case Q4_LAYER_NORM: return norm(s, r);
    case Q4_ROTARY: {
        const Row in = doubles(x, r), table = doubles(other, index);
        const size_t half = table.size() / 2;
        for (size_t c = 0; c < in.size(); ++c) {
            if (c >= 2 * half) {
                out.add(in[c], 0.0);
                continue;
            }
            const bool is_near = s.numbers[0] == 1.0, is_first = is_near ? c % 2 == 0 : c < half;
            const size_t pair = is_near ? c / 2 : c % half, across = is_near ? c ^ 1 : (c + half) % (2 * half);
            const double a = in[c] * table[pair], b = in[across] * table[half + pair] * (is_first ? -1.0 : 1.0);
            out.add(a + b, 3.0 * kUnit * (std::fabs(a) + std::fabs(b)) + kTiny);
        }
        return out;
    }
    case Q4_ATTENTION: return attention(s, r, index);
    case Q4_ATTEND_SPANS: return attention_of_spans(s, r);
    case Q4_MEAN_SPANS: return mean_of_spans(s, r);
    case Q4_SOFTMAX: {
        Row weights;
        const double share = softmax_of(doubles(x, r), 0.0, weights);
        for (const double weight : weights) out.add(weight, weight * share + kTiny);
        return out;
    }
    default: break;
    }
    const Row in = doubles(x, r);
    for (size_t c = 0; c < in.size(); ++c) {
        const auto a = static_cast<float>(in[c]);
        if (s.op == Q4_ADD || s.op == Q4_MULTIPLY) {
            const auto b = static_cast<float>(doubles(other, other.rows == 1 ? 0 : r)[c]);
            const float both = s.op == Q4_ADD ? a + b : a * b;
            out.add(static_cast<double>(both), 0.0);
        } else if (s.op == Q4_AFFINE) {
            const float product = a * static_cast<float>(s.numbers[0]);
            const float sum = product + static_cast<float>(s.numbers[1]);
            out.add(static_cast<double>(sum), 0.0);
        } else if (s.op == Q4_COPY) {
            out.add(in[c], 0.0);
        } else {
            const double value = true_activation(s.op, in[c]);
            // The argument of gelu_tanh's exponential is rounded.
            const double argument = 1.6 * (std::fabs(in[c]) + 0.045 * std::fabs(in[c] * in[c] * in[c]));
            const double share = s.op == Q4_RELU ? 0.0 : kFunction + (s.op == Q4_GELU_TANH ? 4.0 * kUnit * std::min(argument, 110.0) : 0.0);
            out.add(value, std::fabs(value) * share + (s.op == Q4_RELU ? 0.0 : kTiny));
        }
    }
    return out;
}

// Columns in falling order, equals by column, NaN first.
std::vector<int64_t> falling(const Row& x) {
    std::vector<int64_t> order;
    for (size_t c = 0; c < x.size(); ++c) order.push_back(static_cast<int64_t>(c));
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        const double p = x[static_cast<size_t>(a)], q = x[static_cast<size_t>(b)];
        if (std::isnan(p) != std::isnan(q)) return std::isnan(p);
        return std::isnan(p) || p == q ? a < b : p > q;
    });
    return order;
}

std::string tell(const q4_step& s, int64_t row, size_t column, double got, double wanted, double error) {
    char text[200];
    std::snprintf(text, sizeof text, "operation %d: y[%ld, %zu] = %.9g must be %.9g ± %.3g", s.op, static_cast<long>(row), column, got,
                  wanted, error);
    return text;
}

// Where a row of a cache is that a row of x is stored in.
int64_t place_of(const q4_step& s, int64_t r) {
    const int64_t heads = s.inputs[0].rows / s.inputs[1].columns;
    return r % heads * (s.outputs[0].rows / heads) + static_cast<const int64_t*>(s.inputs[1].data)[r / heads];
}

// Whether rows of a token have other bits alone, by one thread or by two: nothing may depend on what is
// computed next to it, however keys and queries are shared.
std::string check_alone(const Step& step, int32_t isa) {
    const q4_step& s = step.step;
    const bool is_spans = s.op == Q4_ATTEND_SPANS;
    const int64_t count = is_spans ? s.inputs[0].rows : s.inputs[3].columns, each = s.inputs[0].rows / count, width = s.outputs[0].columns;
    std::vector<float> alone(static_cast<size_t>(each * width));
    for (int64_t i = 0; i < count; ++i)
        for (int threads = 1; threads < 3; ++threads) {
            Step one = step;
            q4_step& own = one.step;
            own.inputs[0].data = static_cast<float*>(s.inputs[0].data) + i * each * s.inputs[0].stride, own.inputs[0].rows = each;
            own.inputs[3].data = static_cast<int64_t*>(s.inputs[3].data) + (is_spans ? 2 * i : i), own.inputs[3].columns = is_spans ? 2 : 1;
            own.outputs[0] = {alone.data(), each, width, width};
            const std::string wrong = run_program({one}, isa, threads);
            if (!wrong.empty()) return wrong + " (alone)";
            for (int64_t r = 0; r < each; ++r)
                if (std::memcmp(alone.data() + r * width, static_cast<const float*>(s.outputs[0].data) + (i * each + r) * s.outputs[0].stride,
                                static_cast<size_t>(width) * 4) != 0)
                    return "operation " + std::to_string(s.op) + ": other bits of token " + std::to_string(i) + " alone, by " + std::to_string(threads) + " threads";
        }
    return {};
}

// Run one step and compare what it gives with the reference.
std::string check_step(const Step& step, int32_t isa, const std::vector<Buffer>& buffers) {
    const q4_step& s = step.step;
    std::vector<Allowed> rows;
    std::vector<std::vector<int64_t>> orders;
    std::vector<float> product;
    const bool is_order = s.op == Q4_ARGMAX || s.op == Q4_TOP_K;
    const int64_t* indices = step.index_input < 0 ? nullptr : static_cast<const int64_t*>(s.inputs[step.index_input].data);
    if (is_order) {
        for (int64_t r = 0; r < s.inputs[0].rows; ++r) orders.push_back(falling(doubles(s.inputs[0], r)));
    } else if (s.op == Q4_LINEAR && s.layer) {
        product.resize(static_cast<size_t>(s.outputs[0].rows * s.outputs[0].columns));
        q4_call call = step.layer->call;
        call.x = s.inputs[0].data, call.x_rows = s.inputs[0].rows, call.x_stride = s.inputs[0].stride, call.x_type = Q4_F32;
        call.y = product.data(), call.y_stride = s.outputs[0].columns, call.y_type = Q4_F32;
        call.bias = s.input_count == 2 ? s.inputs[1].data : nullptr;
        call.family = s.layer->family, call.threads = 1;
        if (q4_cpu_linear(&s.layer->matrix, &call, isa) != 0) return "q4_cpu_linear failed";
    } else if (s.op == Q4_STORE) {
        for (int64_t r = 0; r < s.inputs[0].rows; ++r) {
            Allowed row;
            for (const double value : doubles(s.inputs[0], r)) row.add(value, 0.0);
            rows.push_back(row);
        }
    } else {
        const int64_t each = indices ? std::max<int64_t>(1, s.outputs[0].rows / s.inputs[step.index_input].columns) : 1;  // rows of a token
        for (int64_t r = 0; r < s.outputs[0].rows; ++r) rows.push_back(allowed(s, step.layer, r, indices ? indices[r / each] : 0));
    }
    std::vector<std::vector<uint8_t>> before;
    for (const Buffer& b : buffers) before.emplace_back(b.data, b.data + b.bytes);
    const std::string wrong = run_program({step}, isa, 1);
    if (!wrong.empty()) return wrong;
    for (int64_t r = 0; r < static_cast<int64_t>(orders.size()); ++r) {
        const auto& order = orders[static_cast<size_t>(r)];
        const int64_t k = s.op == Q4_TOP_K ? s.outputs[0].columns : 1;
        const q4_view& columns = s.outputs[s.op == Q4_TOP_K];
        for (int64_t i = 0; i < k; ++i) {
            const int64_t got = static_cast<const int64_t*>(columns.data)[s.op == Q4_TOP_K ? r * columns.stride + i : r];
            if (got != order[static_cast<size_t>(i)])
                return tell(s, r, static_cast<size_t>(i), static_cast<double>(got), static_cast<double>(order[static_cast<size_t>(i)]), 0.0);
            if (s.op == Q4_TOP_K && std::memcmp(static_cast<const float*>(s.outputs[0].data) + r * s.outputs[0].stride + i,
                                                static_cast<const float*>(s.inputs[0].data) + r * s.inputs[0].stride + got, 4) != 0)
                return "the numbers of top_k are not those of its columns";
        }
    }
    for (int64_t r = 0; !product.empty() && r < s.outputs[0].rows; ++r)
        if (std::memcmp(static_cast<const float*>(s.outputs[0].data) + r * s.outputs[0].stride,
                        product.data() + r * s.outputs[0].columns, static_cast<size_t>(s.outputs[0].columns) * 4) != 0)
            return "other bits than q4_cpu_linear in row " + std::to_string(r);
    for (size_t r = 0; r < rows.size(); ++r) {
        const auto own = static_cast<int64_t>(r);
        const Row got = doubles(s.outputs[0], s.op == Q4_STORE ? place_of(s, own) : own);
        for (size_t c = 0; c < got.size(); ++c) {
            const double wanted = rows[r].value[c], error = rows[r].error[c];
            const bool is_right = error == INFINITY    ? true
                                  : std::isnan(wanted) || std::isinf(wanted) ? std::isnan(got[c]) == std::isnan(wanted)
                                  : got[c] == wanted || std::fabs(got[c] - wanted) <= error || std::fabs(wanted) > 3e38;
            if (!is_right) return tell(s, static_cast<int64_t>(r), c, got[c], wanted, error);
        }
    }
    if (s.op == Q4_ATTENTION || s.op == Q4_ATTEND_SPANS) {
        const std::string other = check_alone(step, isa);
        if (!other.empty()) return other;
    }
    // Nothing else may have changed: put what may have back, and compare.
    std::vector<std::vector<uint8_t>> after;
    for (const Buffer& b : buffers) after.emplace_back(b.data, b.data + b.bytes);
    for (int o = 0; o < s.output_count; ++o) {
        const int64_t size = s.op == Q4_ARGMAX || o == 1 ? 8 : 4, heads = s.op == Q4_STORE ? s.inputs[0].rows : s.outputs[o].rows;
        for (int64_t r = 0; r < heads; ++r) {
            const int64_t place = s.op == Q4_STORE ? place_of(s, r) : r;
            auto* from = static_cast<uint8_t*>(s.outputs[o].data) + place * s.outputs[o].stride * size;
            for (size_t b = 0; b < buffers.size(); ++b)
                if (from >= buffers[b].data && from < buffers[b].data + buffers[b].bytes)
                    std::copy_n(after[b].begin() + (from - buffers[b].data), s.outputs[o].columns * size,
                                before[b].begin() + (from - buffers[b].data));
        }
    }
    return before == after ? std::string{} : "operation " + std::to_string(s.op) + " wrote elsewhere";
}

std::string check_program(const Made& made, Memory& memory, const Isa& isa, Random& r) {
    made.restore();
    for (const Step& step : made.steps) {
        const std::string wrong = check_step(step, isa.number, made.buffers);
        if (!wrong.empty()) return wrong;
        if (!memory.is_untouched()) return "bytes around a buffer were written";
    }
    std::vector<std::vector<uint8_t>> wanted;
    for (const Buffer& b : made.buffers) wanted.emplace_back(b.data, b.data + b.bytes);
    for (const int threads : {1, 2, static_cast<int>(r.between(3, 8))}) {
        made.restore();
        const std::string wrong = run_program(made.steps, isa.number, threads);
        if (!wrong.empty()) return wrong + " (all steps)";
        for (size_t b = 0; b < wanted.size(); ++b)
            if (std::memcmp(wanted[b].data(), made.buffers[b].data, wanted[b].size()) != 0)
                return "other bits in buffer " + std::to_string(b) + " with " + std::to_string(threads) + " threads";
        if (!memory.is_untouched()) return "bytes around a buffer were written by all steps";
    }
    return {};
}

}  // namespace

int programs(const Arguments& a, bool is_guarded) {
    const char* command = is_guarded ? "program-guard" : "program";
    Memory memory(is_guarded);
    int failures = 0;
    int64_t steps = 0;
    for (int64_t i = 0; i < a.count && failures < 10; ++i) {
        const uint64_t seed = a.seed + static_cast<uint64_t>(i);
        memory.clear();
        const Made made = make_program(seed, memory);
        steps += static_cast<int64_t>(made.steps.size());
        Random r(seed ^ 0x7072);
        const Isa& isa = a.isas[static_cast<size_t>(i) % a.isas.size()];
        const std::string wrong = check_program(made, memory, isa, r);
        if (wrong.empty()) continue;
        ++failures;
        std::printf("%s 1 %llu %s: %s\n", command, static_cast<unsigned long long>(seed), isa.name, wrong.c_str());
    }
    if (!failures) std::printf("%s: %lld programs of %lld steps passed\n", command, static_cast<long long>(a.count), static_cast<long long>(steps));
    return failures ? 1 : 0;
}

}  // namespace q4test
