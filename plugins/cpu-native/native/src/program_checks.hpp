// Which steps make sense; what they read and write, and how they may be shared.
#pragma once

#include <cmath>
#include <vector>

#include "checks.hpp"

namespace q4 {

// How the threads of a team divide a step: by 16 columns of its output, by rows, or not at all.
enum class Split { COLUMNS, ROWS, ALONE };

inline bool is_view(const q4_view& v, int element = 4) {
    return v.data && is_size(v.rows) && is_size(v.columns) && v.stride >= v.columns && is_size(v.stride) &&
           reinterpret_cast<uintptr_t>(v.data) % static_cast<uintptr_t>(element) == 0;
}

inline bool is_shape(const q4_view& v, int64_t rows, int64_t columns) { return v.rows == rows && v.columns == columns; }

inline bool is_same(const q4_view& a, const q4_view& b) {
    return a.data == b.data && is_shape(a, b.rows, b.columns) && (a.stride == b.stride || a.rows == 1);
}

struct Span {
    uintptr_t first, last, row, stride;  // bytes; row: of one row

    Span(const q4_view& v, int element) {
        const auto size = static_cast<uintptr_t>(element);
        first = reinterpret_cast<uintptr_t>(v.data);
        row = static_cast<uintptr_t>(v.columns) * size;
        stride = v.rows == 1 ? 0 : static_cast<uintptr_t>(v.stride) * size;
        last = first + static_cast<uintptr_t>(v.rows - 1) * static_cast<uintptr_t>(v.stride) * size + row;
    }
};

// Whether two views share a byte; columns side by side, of rows of one stride, do not.
inline bool overlap(const Span& a, const Span& b) {
    if (a.last <= b.first || b.last <= a.first) return false;
    const uintptr_t stride = a.stride ? a.stride : b.stride;
    if (!stride || (a.stride && b.stride && a.stride != b.stride)) return true;
    if (a.row > stride || b.row > stride) return true;
    // Where b's first byte lies in the row that a's begins.
    const uintptr_t place = (b.first + stride - a.first % stride) % stride;
    return place < a.row || place + b.row > stride;
}

inline bool is_whole(double value, double least, double most) {
    return value >= least && value <= most && value == std::floor(value);
}

inline bool is_activation(int32_t op) { return op >= Q4_RELU && op <= Q4_TANH; }

// Which operations may write exactly over what they read, element by element or row by row.
inline bool works_in_place(int32_t op) {
    return op == Q4_RMS_NORM || op == Q4_LAYER_NORM || op == Q4_ROTARY || (op >= Q4_ADD && op <= Q4_SOFTMAX);
}

inline Split split_of(const q4_step& s) {
    switch (s.op) {
    case Q4_RMS_NORM:
    case Q4_LAYER_NORM:  // one row is shared by its columns, unless others read it after it is overwritten
        return s.inputs[0].rows == 1 && !is_same(s.inputs[0], s.outputs[0]) ? Split::COLUMNS : Split::ROWS;
    case Q4_STORE:  // of tokens at one place the last one counts, and a row of int8 has one scale
        return s.inputs[1].columns == 1 ? Split::ROWS : s.cache_type == Q4_F32 ? Split::COLUMNS : Split::ALONE;
    case Q4_ROTARY:
    case Q4_ATTENTION:
    case Q4_ATTEND_SPANS:
    case Q4_SOFTMAX:
    case Q4_ARGMAX:
    case Q4_TOP_K: return Split::ROWS;
    default: return Split::COLUMNS;
    }
}

// The input of positions, and how many tokens they are of.
inline int positions_input(const q4_step& s) {
    return s.op == Q4_ROTARY ? 2 : s.op == Q4_STORE ? 1 : s.op == Q4_ATTENTION ? 3 : -1;
}
// The input of spans, a pair of numbers for each row of the output: the first row of another input, and behind the last one.
inline int spans_input(const q4_step& s) { return s.op == Q4_ATTEND_SPANS ? 3 : s.op == Q4_MEAN_SPANS ? 1 : -1; }
inline bool has_spans(const q4_step& s) { return is_shape(s.inputs[spans_input(s)], 1, 2 * s.outputs[0].rows); }
inline int64_t tokens_of(const q4_step& s) { return positions_input(s) < 0 ? 1 : s.inputs[positions_input(s)].columns; }
// Whether x has as many rows for each token as for another.
inline bool has_positions(const q4_step& s) {
    const q4_view& v = s.inputs[positions_input(s)];
    return v.rows == 1 && s.inputs[0].rows % v.columns == 0;
}

inline bool is_spiking(int32_t op) { return op >= Q4_INTEGRATE && op <= Q4_UNPACK; }

// Which input is the number of the round; -1 for none.
inline int clock_input(const q4_step& s) {
    if (!is_spiking(s.op) || s.op == Q4_INTEGRATE) return -1;
    return s.op == Q4_FIRE ? 3 : 1;
}
inline bool has_bits_input(const q4_step& s, int i) {
    return i == 0 && (s.op == Q4_SPIKES || s.op == Q4_SEND || s.op == Q4_UNPACK);
}
inline bool has_bits_output(const q4_step& s, int i) { return s.op == Q4_PACK || (s.op == Q4_FIRE && i == 0); }

// A ring of R rows a slot, of which a step reads or writes one: which rounds before its own; -1 for another view.
struct RingUse {
    int64_t rows = 0, lag = 0;
};
inline RingUse ring_use(const q4_step& s, bool is_input, int i) {
    const auto number = [&](int at) { return static_cast<int64_t>(s.numbers[at]); };
    switch (s.op) {
    case Q4_FIRE: return !is_input && i == 0 ? RingUse{s.inputs[0].rows, 0} : RingUse{};
    case Q4_SPIKES:
    case Q4_ROW:
    case Q4_UNPACK: return is_input && i == 0 ? RingUse{s.outputs[0].rows, number(0)} : RingUse{};
    case Q4_SEND: return is_input && i == 0 ? RingUse{number(1), number(0)} : RingUse{};
    case Q4_TAKE: return (is_input && i == 0) || (!is_input && i == 1) ? RingUse{s.outputs[0].rows, 0} : RingUse{};
    case Q4_STORE_ROW: return !is_input ? RingUse{s.inputs[0].rows, 0} : RingUse{};
    case Q4_PACK: return !is_input ? RingUse{s.inputs[0].rows, 0} : RingUse{};
    default: return {};
    }
}

inline bool has_int64_input(const q4_step& s, int i) {
    return i == clock_input(s) || (s.op == Q4_EMBEDDING && i == 0) || i == positions_input(s) || i == spans_input(s);
}
inline bool has_int64_output(const q4_step& s, int i) { return has_bits_output(s, i) || s.op == Q4_ARGMAX || (s.op == Q4_TOP_K && i == 1); }

// Keys and values, of which a row of int8 has its scale behind it.
inline bool is_cache(const q4_step& s, bool is_input, int i) {
    return is_input ? s.op == Q4_ATTENTION && (i == 1 || i == 2) : s.op == Q4_STORE;
}
inline int cache_bytes(const q4_step& s) { return s.cache_type == Q4_I8 ? 1 : s.cache_type == Q4_F16 ? 2 : 4; }
inline int64_t cache_columns(const q4_step& s) { return s.inputs[0].columns + (s.cache_type == Q4_I8 ? 4 : 0); }

inline int input_bytes(const q4_step& s, int i) {
    return is_cache(s, true, i) ? cache_bytes(s) : has_int64_input(s, i) || has_bits_input(s, i) ? 8 : 4;
}
inline int output_bytes(const q4_step& s, int i) { return is_cache(s, false, i) ? cache_bytes(s) : has_int64_output(s, i) ? 8 : 4; }

constexpr int64_t kMostRounds = int64_t{1} << 62;

// The input of tokens, of a position or of the round, or -1, and how many numbers are in range: 0 … range - 1.
struct Indices {
    int input = -1;
    int64_t range = 0;

    explicit Indices(const q4_step& s) {
        for (int i = 0; i < s.input_count; ++i)
            if (has_int64_input(s, i)) input = i;
        if (s.op == Q4_EMBEDDING) range = s.layer ? s.layer->matrix.rows : s.inputs[1].rows;
        if (s.op == Q4_ROTARY) range = s.inputs[1].rows;
        if (s.op == Q4_STORE) range = s.outputs[0].rows / (s.inputs[0].rows / tokens_of(s));
        if (s.op == Q4_ATTENTION) range = s.inputs[1].rows / static_cast<int64_t>(s.numbers[0]);
        if (spans_input(s) >= 0) range = s.inputs[s.op == Q4_ATTEND_SPANS ? 1 : 0].rows + 1;
        if (is_spiking(s.op)) range = kMostRounds;
    }
};

inline q4_call call_of(const q4_step& s) {
    const q4_layer& l = *s.layer;
    q4_call c{};
    c.tiles = l.tiles, c.global_scale = l.global_scale, c.global_count = l.global_count, c.global_divides = l.global_divides;
    c.x = s.inputs[0].data, c.x_rows = s.inputs[0].rows, c.x_stride = s.inputs[0].stride, c.x_type = Q4_F32;
    c.y = s.outputs[0].data, c.y_stride = s.outputs[0].stride, c.y_type = Q4_F32;
    if (s.input_count == 2) c.bias = s.inputs[1].data;
    c.family = l.family, c.threads = 1, c.inputs = l.inputs;
    return c;
}

inline bool has_counts(const q4_step& s, int inputs, int outputs, int numbers) {
    return s.input_count == inputs && s.output_count == outputs && s.number_count == numbers;
}

inline bool is_linear(const q4_step& s) {
    const q4_view &x = s.inputs[0], &y = s.outputs[0];
    const int first = s.layer ? 1 : 2;
    if (s.number_count != 1 || !is_whole(s.numbers[0], 0, 1) || s.output_count != 1) return false;
    const bool has_bias = s.numbers[0] == 1.0;
    if (s.input_count != first + has_bias || y.rows != x.rows) return false;
    if (has_bias && !is_shape(s.inputs[first], 1, y.columns)) return false;
    if (!s.layer) return is_shape(s.inputs[1], y.columns, x.columns);
    const q4_matrix& m = s.layer->matrix;
    if (!is_sound(&m) || m.rows != y.columns || m.columns != x.columns) return false;
    const q4_call c = call_of(s);
    return is_sound(m, &c);
}

inline bool is_embedding(const q4_step& s) {
    const q4_view &tokens = s.inputs[0], &y = s.outputs[0];
    if (!has_counts(s, s.layer ? 1 : 2, 1, 0) || !is_shape(tokens, 1, y.rows)) return false;
    if (!s.layer) return s.inputs[1].columns == y.columns;
    const q4_layer& l = *s.layer;
    if (!is_sound(&l.matrix) || !l.tiles || l.matrix.columns != y.columns || l.inputs.order || l.inputs.factor) return false;
    return !l.global_scale || ((l.global_count == 1 || l.global_count == l.matrix.rows) && is_aligned(l.global_scale, Q4_F32));
}

inline bool is_attention(const q4_step& s) {
    const q4_view &query = s.inputs[0], &keys = s.inputs[1], &values = s.inputs[2], &y = s.outputs[0];
    if (!has_counts(s, 4, 1, 3) || !is_shape(y, query.rows, query.columns) || !has_positions(s)) return false;
    if (keys.columns != cache_columns(s) || !is_shape(values, keys.rows, keys.columns)) return false;
    const int64_t heads = query.rows / tokens_of(s);
    if (!is_whole(s.numbers[0], 1, static_cast<double>(heads)) || !is_whole(s.numbers[2], 0, 1 << 30)) return false;
    const auto kv_heads = static_cast<int64_t>(s.numbers[0]);
    return heads % kv_heads == 0 && keys.rows % kv_heads == 0 && !std::isnan(s.numbers[1]);
}

inline bool is_attention_of_spans(const q4_step& s) {
    const q4_view &query = s.inputs[0], &keys = s.inputs[1], &values = s.inputs[2], &y = s.outputs[0];
    if (!has_counts(s, 4, 1, 3) || !is_shape(y, query.rows, query.columns) || !has_spans(s)) return false;
    if (!is_whole(s.numbers[0], 1, static_cast<double>(query.columns)) || !is_whole(s.numbers[1], 1, s.numbers[0])) return false;
    const auto heads = static_cast<int64_t>(s.numbers[0]), kv_heads = static_cast<int64_t>(s.numbers[1]);
    if (query.columns % heads || heads % kv_heads || keys.columns != query.columns / heads * kv_heads) return false;
    return is_shape(values, keys.rows, keys.columns) && !std::isnan(s.numbers[2]);
}

inline bool is_vector(const q4_view& v, int64_t columns) { return v.rows == 1 && (v.columns == 1 || v.columns == columns); }
inline bool are_bits(const q4_view& v, int64_t rows, int64_t columns) {
    return v.columns == ceil_div(columns, 64) && rows >= 1 && v.rows % rows == 0;
}

inline bool is_sound_synapses(const q4_synapses* s) {
    if (!s || !is_size(s->sources) || !is_size(s->targets) || s->entries < 32 || s->entries % 32 || !s->starts || !s->first || !s->gaps ||
        !s->delays || !s->codes || !s->levels || (s->gap_bytes != 1 && s->gap_bytes != 2))
        return false;
    if (s->starts[0] < 0 || s->starts[s->sources] > s->entries) return false;
    for (int64_t i = 0; i < s->sources; ++i) {
        if (s->starts[i + 1] < s->starts[i]) return false;
        int64_t target = s->first[i];
        if (target < 0) return false;
        for (int64_t e = s->starts[i]; e < s->starts[i + 1]; ++e)
            target += s->gap_bytes == 1 ? static_cast<const uint8_t*>(s->gaps)[e] : static_cast<const uint16_t*>(s->gaps)[e];
        if (target >= s->targets) return false;
    }
    return true;
}

// Those of spiking networks.
inline bool has_sound_spikes(const q4_step& s) {
    const q4_view &x = s.inputs[0], &y = s.outputs[0];
    const int clock = clock_input(s);
    if (clock >= 0 && (s.input_count <= clock || !is_shape(s.inputs[clock], 1, 1))) return false;
    for (int i = 0; i < s.number_count; ++i)
        if (!is_whole(s.numbers[i], 0, 1 << 30)) return false;
    const auto number = [&](int at) { return static_cast<int64_t>(s.numbers[at]); };
    const auto is_like = [](const q4_view& a, const q4_view& b) { return is_shape(a, b.rows, b.columns); };
    // As many slots as needed for what was some rounds ago to be there.
    const auto is_ring = [&](const q4_view& ring, int64_t rows, int64_t lag) { return ring.rows % rows == 0 && lag < ring.rows / rows; };
    switch (s.op) {
    case Q4_INTEGRATE:
        if (!(s.input_count >= 3 && s.input_count <= 5 && s.output_count == 1 && s.number_count == 0)) return false;
        for (int i = 2; i < s.input_count; ++i)
            if (!is_vector(s.inputs[i], x.columns)) return false;
        return is_same(x, y) && is_like(s.inputs[1], x);
    case Q4_FIRE: {
        const bool waits = s.input_count == 7;
        if (!has_counts(s, waits ? 7 : 4, waits ? 3 : 2, 2) || s.numbers[0] > 2 || s.numbers[1] > 1) return false;
        const q4_view& threshold = s.inputs[1];
        if ((threshold.rows != 1 && threshold.rows != x.rows) || (threshold.columns != 1 && threshold.columns != x.columns)) return false;
        if (!is_vector(s.inputs[2], x.columns) || !is_same(s.outputs[1], x) || !are_bits(y, x.rows, x.columns)) return false;
        return !waits || (is_like(s.inputs[4], x) && is_same(s.inputs[4], s.outputs[2]) && is_like(s.inputs[5], x) &&
                          is_vector(s.inputs[6], x.columns));
    }
    case Q4_SPIKES: {
        if ((!has_counts(s, 2, 1, 1) && !has_counts(s, 3, 1, 1)) || !s.layer) return false;
        if (s.input_count == 3 && !is_shape(s.inputs[2], 1, y.columns)) return false;
        const q4_layer& l = *s.layer;
        if (!is_sound(&l.matrix) || l.matrix.rows != y.columns || !l.tiles || l.inputs.factor) return false;
        if (l.global_scale && ((l.global_count != 1 && l.global_count != l.matrix.rows) || !is_aligned(l.global_scale, Q4_F32))) return false;
        return x.columns <= ceil_div(l.matrix.columns, 64) && is_ring(x, y.rows, number(0));
    }
    case Q4_SEND:
        if (!has_counts(s, 3, 1, 2) || number(1) < 1 || !is_sound_synapses(s.synapses) || !is_same(s.inputs[2], y)) return false;
        if (!are_bits(x, number(1), s.synapses->sources) || !is_ring(x, number(1), number(0)) || y.rows % number(1)) return false;
        if (y.columns != s.synapses->targets) return false;
        for (int64_t e = 0; e < s.synapses->entries; ++e)
            if (s.synapses->delays[e] >= y.rows / number(1)) return false;
        return true;
    case Q4_TAKE: return has_counts(s, 2, 2, 0) && is_same(x, s.outputs[1]) && x.columns == y.columns && is_ring(x, y.rows, 0);
    case Q4_ROW: return has_counts(s, 2, 1, 1) && x.columns == y.columns && is_ring(x, y.rows, number(0));
    case Q4_STORE_ROW: return has_counts(s, 2, 1, 0) && x.columns == y.columns && is_ring(y, x.rows, 0);
    case Q4_PACK: return has_counts(s, 2, 2, 0) && are_bits(y, x.rows, x.columns) && are_bits(s.outputs[1], x.rows, x.columns);
    default: return has_counts(s, 2, 1, 1) && are_bits(x, y.rows, y.columns) && is_ring(x, y.rows, number(0));
    }
}

// Which input an output is the same as, where it must be; -1 for none.
inline int alias_of(const q4_step& s, int output) {
    if (s.op == Q4_INTEGRATE) return 0;
    if (s.op == Q4_FIRE) return output == 1 ? 0 : output == 2 ? 4 : -1;
    if (s.op == Q4_SEND) return 2;
    return s.op == Q4_TAKE && output == 1 ? 0 : -1;
}

// Shapes and numbers, once views and counts make sense.
inline bool has_sound_shapes(const q4_step& s) {
    const q4_view &x = s.inputs[0], &y = s.outputs[0];
    const bool is_like_x = is_shape(y, x.rows, x.columns);
    if (is_spiking(s.op)) return has_sound_spikes(s);
    switch (s.op) {
    case Q4_EMBEDDING: return is_embedding(s);
    case Q4_LINEAR: return is_linear(s);
    case Q4_RMS_NORM:
        return has_counts(s, 2, 1, 2) && is_like_x && is_shape(s.inputs[1], 1, x.columns) && s.numbers[0] >= 0.0 &&
               is_whole(s.numbers[1], 0, 1);
    case Q4_LAYER_NORM:
        return has_counts(s, 3, 1, 1) && is_like_x && is_shape(s.inputs[1], 1, x.columns) &&
               is_shape(s.inputs[2], 1, x.columns) && s.numbers[0] >= 0.0;
    case Q4_ROTARY:
        return has_counts(s, 3, 1, 1) && is_like_x && s.inputs[1].columns <= x.columns && s.inputs[1].columns % 2 == 0 &&
               has_positions(s) && is_whole(s.numbers[0], 0, 1);
    case Q4_STORE:
        return has_counts(s, 2, 1, 0) && has_positions(s) && y.columns == cache_columns(s) && y.rows % (x.rows / tokens_of(s)) == 0;
    case Q4_ATTENTION: return is_attention(s);
    case Q4_ATTEND_SPANS: return is_attention_of_spans(s);
    case Q4_MEAN_SPANS: return has_counts(s, 2, 1, 0) && y.columns == x.columns && has_spans(s);
    case Q4_ADD:
    case Q4_MULTIPLY:
        return has_counts(s, 2, 1, 0) && is_like_x && s.inputs[1].columns == x.columns &&
               (s.inputs[1].rows == x.rows || s.inputs[1].rows == 1);
    case Q4_AFFINE: return has_counts(s, 1, 1, 2) && is_like_x;
    case Q4_ARGMAX: return has_counts(s, 1, 1, 0) && is_shape(y, 1, x.rows);
    case Q4_TOP_K:
        return has_counts(s, 1, 2, 1) && is_whole(s.numbers[0], 1, static_cast<double>(x.columns)) &&
               is_shape(y, x.rows, static_cast<int64_t>(s.numbers[0])) && is_shape(s.outputs[1], y.rows, y.columns);
    default: return has_counts(s, 1, 1, 0) && is_like_x;
    }
}

inline bool is_sound(const q4_step& s) {
    if (s.op < Q4_EMBEDDING || s.op > Q4_MEAN_SPANS) return false;
    const bool is_narrow = s.cache_type == Q4_F16 || s.cache_type == Q4_I8;
    if (s.cache_type != Q4_F32 && !(is_narrow && (s.op == Q4_STORE || s.op == Q4_ATTENTION))) return false;
    if ((s.layer && s.op != Q4_EMBEDDING && s.op != Q4_LINEAR && s.op != Q4_SPIKES) || (s.synapses && s.op != Q4_SEND)) return false;
    if (s.input_count < 1 || s.input_count > Q4_MOST_INPUTS || s.output_count < 1 || s.output_count > Q4_MOST_OUTPUTS) return false;
    for (int i = 0; i < s.input_count; ++i)
        if (!is_view(s.inputs[i], input_bytes(s, i))) return false;
    for (int i = 0; i < s.output_count; ++i)
        if (!is_view(s.outputs[i], output_bytes(s, i))) return false;
    if (!has_sound_shapes(s)) return false;
    for (int o = 0; o < s.output_count; ++o) {
        for (int other = 0; other < o; ++other)
            if (overlap({s.outputs[o], output_bytes(s, o)}, {s.outputs[other], output_bytes(s, other)})) return false;
        for (int i = 0; i < s.input_count; ++i) {
            if (i == alias_of(s, o) || !overlap({s.outputs[o], output_bytes(s, o)}, {s.inputs[i], input_bytes(s, i)})) continue;
            const bool may = works_in_place(s.op) && (i == 0 || (i == 1 && (s.op == Q4_ADD || s.op == Q4_MULTIPLY)));
            if (!may || !is_same(s.outputs[o], s.inputs[i])) return false;
        }
    }
    return true;
}

}  // namespace q4
