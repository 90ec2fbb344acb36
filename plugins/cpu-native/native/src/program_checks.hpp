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
    case Q4_ROTARY:
    case Q4_STORE:
    case Q4_ATTENTION:
    case Q4_SOFTMAX:
    case Q4_ARGMAX:
    case Q4_TOP_K: return Split::ROWS;
    default: return Split::COLUMNS;
    }
}

inline bool has_int64_input(const q4_step& s, int i) {
    return (s.op == Q4_EMBEDDING && i == 0) || (s.op == Q4_ROTARY && i == 2) || (s.op == Q4_STORE && i == 1) ||
           (s.op == Q4_ATTENTION && i == 3);
}
inline bool has_int64_output(const q4_step& s, int i) { return s.op == Q4_ARGMAX || (s.op == Q4_TOP_K && i == 1); }

// The input of tokens or of a position, or -1, and how many numbers are in range: 0 … range - 1.
struct Indices {
    int input = -1;
    int64_t range = 0;

    explicit Indices(const q4_step& s) {
        for (int i = 0; i < s.input_count; ++i)
            if (has_int64_input(s, i)) input = i;
        if (s.op == Q4_EMBEDDING) range = s.layer ? s.layer->matrix.rows : s.inputs[1].rows;
        if (s.op == Q4_ROTARY) range = s.inputs[1].rows;
        if (s.op == Q4_STORE) range = s.outputs[0].rows / s.inputs[0].rows;
        if (s.op == Q4_ATTENTION) range = s.inputs[1].rows / static_cast<int64_t>(s.numbers[0]);
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
    if (!has_counts(s, 4, 1, 3) || !is_shape(y, query.rows, query.columns) || !is_shape(s.inputs[3], 1, 1)) return false;
    if (keys.columns != query.columns || !is_shape(values, keys.rows, keys.columns)) return false;
    if (!is_whole(s.numbers[0], 1, static_cast<double>(query.rows)) || !is_whole(s.numbers[2], 0, 1 << 30)) return false;
    const auto kv_heads = static_cast<int64_t>(s.numbers[0]);
    return query.rows % kv_heads == 0 && keys.rows % kv_heads == 0 && !std::isnan(s.numbers[1]);
}

// Shapes and numbers, once views and counts make sense.
inline bool has_sound_shapes(const q4_step& s) {
    const q4_view &x = s.inputs[0], &y = s.outputs[0];
    const bool is_like_x = is_shape(y, x.rows, x.columns);
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
               is_shape(s.inputs[2], 1, 1) && is_whole(s.numbers[0], 0, 1);
    case Q4_STORE:
        return has_counts(s, 2, 1, 0) && is_shape(s.inputs[1], 1, 1) && y.columns == x.columns && y.rows % x.rows == 0;
    case Q4_ATTENTION: return is_attention(s);
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
    if (s.op < Q4_EMBEDDING || s.op > Q4_TOP_K || (s.layer && s.op != Q4_EMBEDDING && s.op != Q4_LINEAR)) return false;
    if (s.input_count < 1 || s.input_count > Q4_MOST_INPUTS || s.output_count < 1 || s.output_count > Q4_MOST_OUTPUTS) return false;
    for (int i = 0; i < s.input_count; ++i)
        if (!is_view(s.inputs[i], has_int64_input(s, i) ? 8 : 4)) return false;
    for (int i = 0; i < s.output_count; ++i)
        if (!is_view(s.outputs[i], has_int64_output(s, i) ? 8 : 4)) return false;
    if (!has_sound_shapes(s)) return false;
    if (s.op == Q4_TOP_K && overlap({s.outputs[0], 4}, {s.outputs[1], 8})) return false;
    for (int o = 0; o < s.output_count; ++o)
        for (int i = 0; i < s.input_count; ++i) {
            if (!overlap({s.outputs[o], has_int64_output(s, o) ? 8 : 4}, {s.inputs[i], has_int64_input(s, i) ? 8 : 4})) continue;
            const bool may = works_in_place(s.op) && (i == 0 || (i == 1 && (s.op == Q4_ADD || s.op == Q4_MULTIPLY)));
            if (!may || !is_same(s.outputs[o], s.inputs[i])) return false;
        }
    return true;
}

}  // namespace q4
