#include <stdexcept>

#include "programs.hpp"

namespace q4test {
namespace {

class Maker {
  public:
    Maker(uint64_t seed, Memory& memory) : r_(seed), memory_(memory) {}

    Made make() {
        const int64_t count = r_.chance(0.3) ? 1 : r_.between(2, 14);
        while (static_cast<int64_t>(made_.steps.size()) < count) add_step();
        for (Buffer& b : made_.buffers) b.initial.assign(b.data, b.data + b.bytes);
        return std::move(made_);
    }

  private:
    Random r_;
    Memory& memory_;
    Made made_;
    std::vector<q4_view> floats_;  // that steps may read or overwrite

    int64_t width() { return r_.chance(0.2) ? r_.between(100, 700) : r_.chance(0.3) ? 16 * r_.between(1, 12) : r_.between(1, 90); }
    int64_t height() { return r_.chance(0.6) ? 1 : r_.between(2, 9); }

    uint8_t* bytes(int64_t count, int64_t align) {
        // A buffer may begin at any element; where it is guarded it ends at a page, whatever that makes of its start.
        uint8_t* data = memory_.take((count + align - 1) / align * align, r_.of<int64_t>({0, 0, align, 3 * align}), r_.chance(0.2));
        made_.buffers.push_back({data, count, {}});
        return data;
    }

    q4_view fresh(int64_t rows, int64_t columns, double size = 1.0) {
        const int64_t stride = columns + (r_.chance(0.3) ? r_.between(1, 40) : 0);
        const int64_t count = (rows - 1) * stride + columns;
        auto* data = reinterpret_cast<float*>(bytes(4 * count, 4));
        const double extreme = r_.chance(0.1) ? 1e4 : 1.0;
        for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(r_.bell() * size * (r_.chance(0.02) ? extreme : 1.0));
        return {data, rows, columns, stride};
    }

    q4_view indices(int64_t count, int64_t range) {
        auto* data = reinterpret_cast<int64_t*>(bytes(8 * count, 8));
        for (int64_t i = 0; i < count; ++i) data[i] = r_.between(0, range - 1);
        return {data, 1, count, count};
    }

    // For each row the first one of what it sees, and the one behind the last: mostly as those of the row before.
    q4_view spans(int64_t rows, int64_t seen) {
        auto* data = reinterpret_cast<int64_t*>(bytes(16 * rows, 8));
        for (int64_t i = 0; i < rows; ++i) {
            const bool is_same = i && r_.chance(0.6);
            data[2 * i] = is_same ? data[2 * i - 2] : r_.between(0, seen - 1);
            data[2 * i + 1] = is_same && r_.chance(0.7) ? data[2 * i - 1] : r_.between(data[2 * i] + 1, seen);
        }
        return {data, 1, 2 * rows, 2 * rows};
    }

    // What a step reads: the start of something there is, in its own or another shape, or something new.
    q4_view input(int64_t rows, int64_t columns) {
        for (int turn = 0; turn < 4 && !floats_.empty(); ++turn) {
            const q4_view& v = floats_[static_cast<size_t>(r_.between(0, static_cast<int64_t>(floats_.size()) - 1))];
            if (v.rows >= rows && v.columns >= columns)
                return {static_cast<float*>(v.data) + r_.between(0, v.columns - columns), rows, columns, v.stride};
            if (v.rows == 1 && v.columns >= rows * columns) return {v.data, rows, columns, columns};
        }
        floats_.push_back(fresh(rows, columns));
        return floats_.back();
    }
    q4_view any_input() {
        if (!floats_.empty() && r_.chance(0.7)) {
            const q4_view v = floats_[static_cast<size_t>(r_.between(0, static_cast<int64_t>(floats_.size()) - 1))];
            for (int64_t heads = 9; heads > 1 && r_.chance(0.5); --heads)
                if (v.rows == 1 && v.columns % heads == 0) return {v.data, heads, v.columns / heads, v.columns / heads};
            return v;
        }
        return input(height(), width());
    }

    // Where a step writes: over something there is, or something new. Steps that may not be bound try again.
    q4_view output(const q4_step& s, int64_t rows, int64_t columns) {
        if (r_.chance(0.25) && s.inputs[0].rows == rows && s.inputs[0].columns == columns) return s.inputs[0];
        if (r_.chance(0.3)) return input(rows, columns);
        floats_.push_back(fresh(rows, columns));
        return floats_.back();
    }

    const Layer& layer() {
        if (!made_.layers.empty() && r_.chance(0.5))
            return *made_.layers[static_cast<size_t>(r_.between(0, static_cast<int64_t>(made_.layers.size()) - 1))];
        auto made = std::make_unique<Layer>();
        made->source = make_case(r_.next(), memory_, {false});
        const Case& c = made->source;
        uint8_t* tiles = memory_.take(q4_cpu_prepared_bytes(&c.matrix));
        if (q4_cpu_pack(&c.matrix, &c.source, tiles, 1) != 0) throw std::runtime_error("q4_cpu_pack failed");
        made->call = c.call, made->call.tiles = tiles;
        made->layer = {c.matrix, tiles, c.call.global_scale, c.call.global_count, c.call.global_divides, c.call.family, c.call.inputs};
        made_.layers.push_back(std::move(made));
        return *made_.layers.back();
    }

    void add_step() {
        Step step{};
        q4_step& s = step.step;
        s.op = static_cast<int32_t>(r_.chance(0.3)   ? int64_t{Q4_LINEAR}
                                    : r_.chance(0.1) ? r_.between(Q4_ATTEND_SPANS, Q4_MEAN_SPANS)
                                                     : r_.between(Q4_EMBEDDING, Q4_TOP_K));
        s.input_count = s.output_count = 1;
        const auto with = [&](const q4_view& v) { s.inputs[s.input_count++] = v; };
        const auto number = [&](double value) { s.numbers[s.number_count++] = value; };
        const auto gives = [&](int64_t rows, int64_t columns) { s.outputs[0] = output(s, rows, columns); };
        const auto tokens = [&](int64_t most) { return r_.chance(0.6) ? 1 : std::min<int64_t>(most, r_.between(2, 6)); };
        const auto index = [&](int64_t range, int64_t count) { step.index_input = s.input_count, with(indices(count, range)); };
        switch (s.op) {
        case Q4_EMBEDDING: {
            const int64_t count = height();
            step.index_input = 0;
            if (r_.chance(0.7)) {
                step.layer = &layer();
                s.inputs[0] = indices(count, step.layer->layer.matrix.rows);
                gives(count, step.layer->layer.matrix.columns);
            } else {
                const q4_view table = fresh(r_.between(1, 20), width());
                s.inputs[0] = indices(count, table.rows), with(table);
                gives(count, table.columns);
            }
            break;
        }
        case Q4_LINEAR: {
            const int64_t rows = r_.chance(0.1) ? r_.between(10, 70) : height();
            const bool has_bias = r_.chance(0.3);
            if (r_.chance(0.8)) {
                step.layer = &layer();
                const q4_matrix& m = step.layer->layer.matrix;
                const Step* last = made_.steps.empty() ? nullptr : &made_.steps.back();
                if (last && last->layer && last->step.op == Q4_LINEAR && last->step.inputs[0].columns >= m.columns && r_.chance(0.7)) {
                    s.inputs[0] = last->step.inputs[0];  // rows that may be laid out already
                    s.inputs[0].columns = m.columns;
                } else {
                    s.inputs[0] = input(rows, m.columns);
                }
                if (r_.chance(0.05)) static_cast<float*>(s.inputs[0].data)[0] = r_.of<float>({INFINITY, NAN, 1e38f, 1e-38f});
                if (has_bias) with(fresh(1, m.rows));
                gives(s.inputs[0].rows, m.rows);
            } else {
                s.inputs[0] = any_input();
                const int64_t features = width();
                with(fresh(features, s.inputs[0].columns));
                if (has_bias) with(fresh(1, features));
                gives(s.inputs[0].rows, features);
            }
            number(has_bias);
            break;
        }
        case Q4_ROTARY: {
            const int64_t count = tokens(6);
            s.inputs[0] = input(count * height(), 2 * r_.between(1, 40) + r_.between(0, 1));
            with(fresh(r_.between(1, 9), 2 * r_.between(1, s.inputs[0].columns / 2)));
            index(s.inputs[1].rows, count), number(r_.chance(0.5));
            gives(s.inputs[0].rows, s.inputs[0].columns);
            break;
        }
        case Q4_STORE: {
            s.inputs[0] = any_input();
            const int64_t capacity = r_.between(1, 20), rows = s.inputs[0].rows;
            int64_t count = tokens(std::min(rows, capacity));
            while (rows % count) --count;
            index(capacity, count);
            auto* places = static_cast<int64_t*>(s.inputs[1].data);
            for (int64_t i = 1; i < count; ++i) places[i] = (places[i - 1] + 1) % capacity;  // each row has one token
            floats_.push_back(s.outputs[0] = fresh(rows / count * capacity, s.inputs[0].columns));
            break;
        }
        case Q4_ATTENTION: {
            const int64_t kv_heads = r_.between(1, 3), shares = r_.between(1, 3), columns = r_.chance(0.5) ? 64 : r_.between(1, 90);
            const int64_t capacity = r_.chance(0.1) ? r_.between(200, 1100) : r_.chance(0.2) ? r_.between(20, 90) : r_.between(1, 20);
            const int64_t count = r_.chance(0.1) ? r_.between(7, 30) : tokens(6);
            s.inputs[0] = input(count * kv_heads * shares, columns);
            with(input(kv_heads * capacity, columns)), with(fresh(kv_heads * capacity, columns));
            index(capacity, count);
            number(static_cast<double>(kv_heads)), number(r_.uniform() * 0.3), number(r_.chance(0.5) ? 0.0 : static_cast<double>(r_.between(1, r_.chance(0.3) ? 700 : 30)));
            gives(count * kv_heads * shares, columns);
            break;
        }
        case Q4_ATTEND_SPANS: {
            const int64_t kv_heads = r_.between(1, 3), shares = r_.between(1, 3), columns = r_.chance(0.5) ? 64 : r_.between(1, 90);
            const int64_t rows = r_.chance(0.1) ? r_.between(13, 40) : r_.between(1, 9);
            const int64_t seen = r_.chance(0.1) ? r_.between(200, 1100) : r_.chance(0.2) ? r_.between(20, 90) : r_.between(1, 20);
            s.inputs[0] = input(rows, kv_heads * shares * columns);
            with(input(seen, kv_heads * columns)), with(fresh(seen, kv_heads * columns));
            step.index_input = 3, with(spans(rows, seen));
            number(static_cast<double>(kv_heads * shares)), number(static_cast<double>(kv_heads)), number(r_.uniform() * 0.3);
            gives(rows, kv_heads * shares * columns);
            break;
        }
        case Q4_MEAN_SPANS: {
            s.inputs[0] = any_input();
            const int64_t rows = r_.between(1, 9);
            step.index_input = 1, with(spans(rows, s.inputs[0].rows));
            gives(rows, s.inputs[0].columns);
            break;
        }
        case Q4_TOP_K: {
            s.inputs[0] = any_input();
            const int64_t k = r_.between(1, std::min<int64_t>(s.inputs[0].columns, 12));
            number(static_cast<double>(k));
            s.output_count = 2, s.outputs[0] = fresh(s.inputs[0].rows, k);
            s.outputs[1] = {bytes(8 * k * s.inputs[0].rows, 8), s.inputs[0].rows, k, k};
            break;
        }
        case Q4_ARGMAX:
            s.inputs[0] = any_input();
            s.outputs[0] = {bytes(8 * s.inputs[0].rows, 8), 1, s.inputs[0].rows, s.inputs[0].rows};
            break;
        default: {
            s.inputs[0] = any_input();
            const int64_t rows = s.inputs[0].rows, columns = s.inputs[0].columns;
            if (s.op == Q4_RMS_NORM) with(fresh(1, columns)), number(1e-5), number(r_.chance(0.5));
            if (s.op == Q4_LAYER_NORM) with(fresh(1, columns)), with(fresh(1, columns)), number(1e-5);
            if (s.op == Q4_AFFINE) number(r_.bell()), number(r_.bell());
            if (s.op == Q4_ADD || s.op == Q4_MULTIPLY) with(r_.chance(0.3) ? fresh(1, columns) : input(rows, columns));
            gives(rows, columns);
        }
        }
        s.layer = step.layer ? &step.layer->layer : nullptr;
        // Views at random may overlap where they must not: such a step is refused, and another one is made.
        q4_program* program = nullptr;
        if (q4_cpu_program_make(&s, 1, 1, q4_cpu_best_isa() ? q4_cpu_best_isa() : isa_here(), nullptr, nullptr, 0, &program) != 0) return;
        q4_cpu_program_free(program);
        for (const Step& earlier : made_.steps) {  // a value may change between the check of a program and its step
            if (step.index_input < 0) break;
            for (int o = 0; o < earlier.step.output_count; ++o)
                if (earlier.step.outputs[o].data == s.inputs[step.index_input].data) return;
        }
        made_.steps.push_back(step);
    }
    static int32_t isa_here() {
        for (int32_t isa = 1; q4_cpu_isa_name(isa); ++isa)
            if (q4_cpu_has_isa(isa) == 1) return isa;
        return 0;
    }
};

}  // namespace

float Layer::decoded(int64_t n, int64_t k) const {
    const q4_matrix& m = source.matrix;
    const auto block = static_cast<size_t>(n * source.blocks + k / m.block);
    const uint8_t code = source.codes[static_cast<size_t>(n * m.columns + k)];
    auto value = m.bits == 8 ? static_cast<float>(source.byte_value(code)) : m.codebook[code];
    auto scale = static_cast<float>(source.scale[block]);
    if (layer.global_scale) {
        const float global = layer.global_scale[layer.global_count > 1 ? n : 0];
        scale = layer.global_divides ? scale / global : scale * global;
    }
    if (m.second == Q4_ZERO) value -= static_cast<float>(source.second[block]);
    value *= scale;
    if (m.second == Q4_OFFSET) value += static_cast<float>(source.second[block]);
    return value;
}

void Made::restore() const {
    for (const Buffer& b : buffers) std::memcpy(b.data, b.initial.data(), b.initial.size());
}

Made make_program(uint64_t seed, Memory& memory) { return Maker(seed, memory).make(); }

std::string run_program(const std::vector<Step>& steps, int32_t isa, int threads) {
    std::vector<q4_step> plain;
    for (const Step& step : steps) plain.push_back(step.step);
    q4_program* program = nullptr;
    int32_t status = q4_cpu_program_make(plain.data(), static_cast<int64_t>(plain.size()), threads, isa, nullptr, nullptr, 0, &program);
    if (status != 0) return "q4_cpu_program_make returned " + std::to_string(status);
    status = q4_cpu_program_run(program, threads, 1, nullptr, nullptr);
    q4_cpu_program_free(program);
    return status == 0 ? std::string{} : "q4_cpu_program_run returned " + std::to_string(status);
}

}  // namespace q4test
