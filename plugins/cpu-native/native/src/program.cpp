// A program: bound once, with all the memory that runs need, and run by one team of threads that wait for each other only
// where a step needs what another thread wrote.
#include <cstring>
#include <memory>
#include <vector>

#include "barrier.hpp"
#include "product.hpp"
#include "program_checks.hpp"

namespace q4 {
namespace {

constexpr int kColumns = 16;  // that one thread has at least: a tile, and a cache line of float32

// A step that takes less on one thread is not worth a barrier; a wait between two cores takes about 0.3 µs.
constexpr double kSmallNs = 600.0;

// A packed product of a step.
struct Linear {
    q4_layer layer;
    Layout at;
    q4_call call, exact;
    int64_t batch;                   // rows of x at once
    std::vector<Pass> passes, last;  // of a whole batch, and of what remains after whole ones
    Pass one;                        // a row that the family can't hold
    bool has_layout = false;         // the step before has laid the same rows out in the same way

    Linear(const q4_step& s, const Kernels& kernels, int threads)
        : layer(*s.layer), at(layer.matrix), call(call_of(s)), exact(call) {
        exact.family = Q4_EXACT;
        batch = std::min(call.x_rows, batch_rows(at, kernels.panel_rows[call.family], threads));
        plan(kernels, batch, passes);
        if (call.x_rows % batch) plan(kernels, call.x_rows % batch, last);
        one = {0, 1, kernels.direct(layer.matrix, Q4_EXACT, 1), nullptr};
    }
    bool has_panels(const Kernels& kernels, int64_t count) const { return count >= kernels.panel_from[call.family]; }
    bool is_shared() const { return call.x_rows > 1; }  // the rows as laid out; one row is laid out by each thread for itself

    // Whether rows that another product laid out are laid out for this one as well.
    bool takes_layout_of(const Linear& other) const {
        q4_matrix mine = layer.matrix, theirs = other.layer.matrix;
        mine.rows = theirs.rows = 1;
        return call.x == other.call.x && call.x_rows == other.call.x_rows && call.x_stride == other.call.x_stride &&
               call.family == other.call.family && std::memcmp(&mine, &theirs, sizeof mine) == 0 &&
               batch == call.x_rows && other.batch == call.x_rows;
    }

  private:
    void plan(const Kernels& kernels, int64_t count, std::vector<Pass>& to) const {
        each_pass(layer.matrix, call.family, kernels, count, has_panels(kernels, count), [&](const Pass& pass) { to.push_back(pass); });
    }
};

// What a step reads or writes, and which part of it a thread does.
struct Access {
    Span span;
    q4_view view;
    bool is_write, is_whole, is_alone;  // whole: any thread may touch any of it
    Split split;

    // Whether nothing has to happen between this access and a later one.
    bool allows(const Access& later) const {
        if ((!is_write && !later.is_write) || (is_alone && later.is_alone) || !overlap(span, later.span)) return true;
        return !is_alone && !later.is_alone && !is_whole && !later.is_whole && split == later.split && is_same(view, later.view);
    }
};

struct Bound {
    q4_step step;
    Split split;
    std::unique_ptr<Linear> linear;
    const int64_t* indices = nullptr;
    int64_t range = 0;      // of the indices
    bool waits = false;     // for all others, before it begins
};

// Memory of one thread.
struct Thread {
    uint8_t *rows, *exact;  // one row of x
    Panel* panel;
    float *sums, *scores;
    uint8_t odd = 0, exact_odd = 0;
};

struct Range {
    int64_t from, to;
};
Range part_of(int64_t count, int me, int team) { return {count * me / team, count * (me + 1) / team}; }

template <class T> T* row(const q4_view& v, int64_t r) { return static_cast<T*>(v.data) + r * v.stride; }

double cost_ns(const Bound& b) {
    const q4_step& s = b.step;
    const q4_view& x = s.inputs[0];
    const auto rows = static_cast<double>(x.rows), size = rows * static_cast<double>(x.columns);
    if (b.linear) return static_cast<double>(b.linear->at.tiles * b.linear->at.tile_bytes) * (1.0 + rows / 4.0) / 20.0;
    if (s.op == Q4_LINEAR) return size * static_cast<double>(s.outputs[0].columns) / 8.0;
    if (s.op == Q4_EMBEDDING) return static_cast<double>(s.outputs[0].rows * s.outputs[0].columns);
    if (s.op == Q4_ATTENTION) return size * static_cast<double>(s.inputs[1].rows) / 8.0;
    return is_activation(s.op) || s.op >= Q4_SOFTMAX ? size : size / 8.0;
}

Split split_of(const q4_step& s) {
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

// Numbers of one row of a prepared matrix as the codec decodes them: each operation is rounded.
void decode_row(const q4_layer& l, const Kernels& kernels, int64_t n, int64_t from, int64_t to, float* y) {
    const q4_matrix& m = l.matrix;
    const Layout at(m);
    const int r = static_cast<int>(n % kTileRows);
    const uint8_t* tile = l.tiles + n / kTileRows * at.tile_bytes;
    const auto number = [&](const uint8_t* place, int32_t type) {
        alignas(64) uint8_t one[kChunk * 4] = {};
        alignas(64) float wide[kChunk];
        std::memcpy(one, place, static_cast<size_t>(size_of(type)));
        kernels.widen(one, type, wide);
        return wide[0];
    };
    for (int64_t first = from; first < to; first += kChunk / 2) {  // half a chunk, of one block
        const int64_t chunk = first / kChunk;
        const int set = at.sets == 2 ? static_cast<int>(first / (kChunk / 2) % 2) : 0;
        const uint8_t* group = tile + at.group_offset(chunk / at.group_chunks);
        const uint8_t* codes = group + at.head_bytes + chunk % at.group_chunks * at.chunk_bytes + 4 * r;
        float scale = number(group + at.scale_offset(set, r), m.scale_type), second = 0.0f;
        if (l.global_scale) {
            const float global = l.global_scale[l.global_count > 1 ? n : 0];
            scale = l.global_divides ? scale / global : scale * global;
        }
        if (m.second != Q4_NONE) second = number(group + at.second_offset(set, r), m.second_type);
        for (int64_t k = first; k < std::min(to, first + kChunk / 2); ++k) {
            const auto j = static_cast<int>(k % kChunk);
            float value;
            if (m.bits == 8)
                value = static_cast<int8_t>(codes[j / 4 * 64 + j % 4]);
            else
                value = m.codebook[codes[j / 8 * 64 + j % 4] >> (j % 8 < 4 ? 0 : 4) & 15];
            if (m.second == Q4_ZERO) value -= second;
            value *= scale;
            if (m.second == Q4_OFFSET) value += second;
            y[k] = value;
        }
    }
}

void turn(const float* x, const float* table, int64_t turned, int64_t columns, bool are_neighbours, float* y) {
    const int64_t half = turned / 2, step = are_neighbours ? 2 : 1, across = are_neighbours ? 1 : half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i * step], b = x[i * step + across], cosine = table[i], sine = table[half + i];
        y[i * step] = a * cosine - b * sine;
        y[i * step + across] = b * cosine + a * sine;
    }
    if (x != y) std::copy(x + turned, x + columns, y + turned);
}

}  // namespace
}  // namespace q4

struct q4_program {
    q4_program(const q4_step* steps, int64_t count, int threads, const q4::Kernels& kernels);
    int32_t run(int threads);

  private:
    void assign_splits();
    void link();
    std::vector<q4::Access> accesses(const q4::Bound& b) const;
    void take_memory();
    int32_t read_indices();
    void work(int me, int team);
    void perform(const q4::Bound& b, int me, int team);
    void linear(const q4::Linear& l, int me, int team);

    const q4::Kernels& kernels_;
    const q4::Operations& do_;
    int threads_;
    bool is_shared_ = false;  // any step is done by more than one thread
    std::vector<q4::Bound> bound_;
    std::vector<int64_t> indices_, numbers_;  // tokens and positions as they were at the start; 0, 1, 2 …
    std::vector<q4::Line> memory_;
    std::vector<q4::Panel> panels_;
    std::vector<q4::Thread> threads_memory_;
    uint8_t *rows_ = nullptr, *odd_ = nullptr;  // of products of several rows
    q4::Barrier barrier_;
    std::atomic<int32_t> runner_{0};  // 1 + the forks of the process that runs it: a child has its parent's copy
};

q4_program::q4_program(const q4_step* steps, int64_t count, int threads, const q4::Kernels& kernels)
    : kernels_(kernels), do_(*kernels.operations), threads_(threads), barrier_(threads) {
    using namespace q4;
    bound_.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        Bound b{steps[i], split_of(steps[i]), nullptr};
        if (b.step.op == Q4_LINEAR && b.step.layer) b.linear = std::make_unique<Linear>(b.step, kernels, threads);
        if (i && b.linear && bound_.back().linear) b.linear->has_layout = b.linear->takes_layout_of(*bound_.back().linear);
        bound_.push_back(std::move(b));
    }
    assign_splits();
    take_memory();
}

std::vector<q4::Access> q4_program::accesses(const q4::Bound& b) const {
    using namespace q4;
    const q4_step& s = b.step;
    std::vector<Access> out;
    const bool is_alone = b.split == Split::ALONE;
    const auto add = [&](const q4_view& v, int size, bool is_write, bool is_whole) {
        out.push_back({Span(v, size), v, is_write, is_whole, is_alone, b.split});
    };
    const bool is_product = s.op == Q4_LINEAR || s.op == Q4_EMBEDDING;
    for (int i = 0; i < s.input_count; ++i) {
        if (has_int64_input(s, i)) continue;  // copied before the run
        const bool is_beside = i > 0 && s.op != Q4_ADD && s.op != Q4_MULTIPLY;
        const bool is_norm = s.op == Q4_RMS_NORM || s.op == Q4_LAYER_NORM;
        add(s.inputs[i], 4, false, is_product || is_beside || (is_norm && b.split == Split::COLUMNS));
    }
    for (int i = 0; i < s.output_count; ++i)
        add(s.outputs[i], has_int64_output(s, i) ? 8 : 4, true, s.op == Q4_STORE || s.op == Q4_ARGMAX);
    if (b.linear && b.linear->is_shared()) {  // the rows as laid out, which stand for one byte here
        const q4_view rows{const_cast<Line*>(memory_.data()), 1, 1, 1};
        add(rows, 1, !b.linear->has_layout, true);
    }
    return out;
}

// Find before which steps the team must meet.
void q4_program::link() {
    using namespace q4;
    std::vector<Access> since;
    for (Bound& b : bound_) {
        const std::vector<Access> mine = accesses(b);
        b.waits = false;
        for (const Access& earlier : since)
            for (const Access& later : mine) b.waits |= !earlier.allows(later);
        if (b.waits) since.clear();
        since.insert(since.end(), mine.begin(), mine.end());
    }
}

// Steps between barriers of which none is worth the barrier go to one thread, all in turn.
void q4_program::assign_splits() {
    using namespace q4;
    memory_.resize(1);  // stands for the rows as laid out
    link();
    const size_t count = bound_.size();
    std::vector<size_t> begins;
    std::vector<double> costs;
    for (size_t i = 0; i < count; ++i) {
        if (i == 0 || bound_[i].waits) begins.push_back(i), costs.push_back(0.0);
        costs.back() += cost_ns(bound_[i]);
    }
    begins.push_back(count);
    for (size_t first = 0; first < costs.size();) {
        size_t last = first;
        while (last < costs.size() && costs[last] < kSmallNs) ++last;
        if (last - first > 1 || (last == costs.size() && first == 0))
            for (size_t i = begins[first]; i < begins[last]; ++i) bound_[i].split = Split::ALONE;
        first = std::max(last, first + 1);
    }
    for (size_t i = 1; i < count; ++i)  // what one thread has laid out, others have not
        if (bound_[i].linear && bound_[i].split != bound_[i - 1].split) bound_[i].linear->has_layout = false;
    link();
    for (const Bound& b : bound_) is_shared_ = is_shared_ || b.split != Split::ALONE;
}

void q4_program::take_memory() {
    using namespace q4;
    const auto lines = [](int64_t bytes) { return ceil_div(bytes, 64); };
    int64_t shared = 0, odd = 0, rows = 0, exact = 0, sums = 0, scores = 0, indices = 0, numbers = 1;
    bool has_panels = false;
    for (const Bound& b : bound_) {
        const q4_step& s = b.step;
        if (s.op == Q4_ATTENTION) scores = std::max(scores, lines(s.inputs[1].rows / static_cast<int64_t>(s.numbers[0]) * 4));
        const Indices at(s);
        if (at.input >= 0) indices += s.inputs[at.input].columns;
        if (!b.linear) continue;
        const Linear& l = *b.linear;
        const int64_t bytes = std::max(Rows::bytes(l.at, l.call.family, l.batch), Rows::bytes(l.at, l.call.family, 1));
        if (l.is_shared())
            shared = std::max(shared, lines(bytes)), odd = std::max(odd, lines(l.batch));
        else
            rows = std::max(rows, lines(bytes));
        exact = std::max(exact, lines(Rows::bytes(l.at, Q4_EXACT, 1)));
        numbers = std::max(numbers, l.call.x_rows);
        if (!l.has_panels(kernels_, l.batch)) continue;
        has_panels = true;
        sums = std::max(sums, l.batch);
    }
    const int64_t each = rows + exact + sums + scores + 1;  // a line between two threads
    memory_ = std::vector<Line>(static_cast<size_t>(shared + odd + each * threads_ + 1));
    if (has_panels) panels_.resize(static_cast<size_t>(threads_));
    Line* next = memory_.data();
    const auto take = [&](int64_t count) {
        uint8_t* place = next->bytes;
        next += count;
        return place;
    };
    rows_ = take(shared), odd_ = take(odd);
    for (int i = 0; i < threads_; ++i) {
        Thread t{};
        t.rows = take(rows), t.exact = take(exact);
        t.sums = reinterpret_cast<float*>(take(sums)), t.scores = reinterpret_cast<float*>(take(scores + 1));
        t.panel = has_panels ? &panels_[static_cast<size_t>(i)] : nullptr;
        threads_memory_.push_back(t);
    }
    indices_.resize(static_cast<size_t>(indices) + 1);
    numbers_.resize(static_cast<size_t>(numbers));
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i] = static_cast<int64_t>(i);
    const int64_t* place = indices_.data();
    for (Bound& b : bound_) {
        const Indices at(b.step);
        b.indices = place, b.range = at.range;
        if (at.input >= 0) place += b.step.inputs[at.input].columns;
    }
}

// Copy tokens and positions, so that what is checked is what is used.
int32_t q4_program::read_indices() {
    int64_t* to = indices_.data();
    for (size_t i = 0; i < bound_.size(); ++i) {
        const q4::Indices at(bound_[i].step);
        if (at.input < 0) continue;
        const q4_view& v = bound_[i].step.inputs[at.input];
        std::memcpy(to, v.data, static_cast<size_t>(v.columns) * 8);
        for (int64_t j = 0; j < v.columns; ++j)
            if (to[j] < 0 || to[j] >= at.range) return static_cast<int32_t>(i) + 1;
        to += v.columns;
    }
    return 0;
}

int32_t q4_program::run(int threads) {
    using namespace q4;
    const int32_t me = g_forks.load(std::memory_order_relaxed) + 1;
    int32_t runner = runner_.load();
    if (runner == me || !runner_.compare_exchange_strong(runner, me)) return -3;
    const int32_t status = read_indices();
    if (status == 0) {
        threads = is_shared_ ? std::min(threads, threads_) : 1;
        const bool shares = may_share(threads);
        const int64_t start = shares ? now_ns() : 0;
        if (!shares || g_patience.is_alone(start)) {
            const FloatMode plain;
            work(0, 1);
        } else {
            barrier_.reset();
            run_team(threads, [this](int64_t one, int64_t team) {
                const FloatMode plain;
                work(static_cast<int>(one), static_cast<int>(team));
            });
            // Waiting for a quarter of its own time, of hundreds of barriers, is no imbalance.
            const int64_t end = now_ns(), done = end - barrier_.waited_ns();
            g_patience.judge(done - (done - start) / 4, done, end);
        }
    }
    runner_.store(0);
    return status;
}

void q4_program::work(int me, int team) {
    using namespace q4;
    for (const Bound& b : bound_) {
        // Asking for the next tiles here (2, 8 and 16 KiB of them) gave less than 1 %, and was left out.
        if (b.waits && team > 1) barrier_.wait(me, team);
        if (b.split != Split::ALONE)
            perform(b, me, team);
        else if (me == 0)
            perform(b, 0, 1);
    }
    if (team > 1) barrier_.wait(me, team);  // spinning is shorter than what ends a team, and is counted
}

void q4_program::linear(const q4::Linear& l, int me, int team) {
    using namespace q4;
    Thread& mine = threads_memory_[static_cast<size_t>(me)];
    const Range tiles = part_of(l.at.tiles, me, team);
    const q4_matrix& m = l.layer.matrix;
    for (int64_t first = 0; first < l.call.x_rows; first += l.batch) {
        const int64_t count = std::min(l.batch, l.call.x_rows - first);
        const std::vector<Pass>& passes = count == l.batch ? l.passes : l.last;
        uint8_t* odd = l.is_shared() ? odd_ : &mine.odd;
        const Product product{m, l.at, l.call, kernels_, passes.data(), static_cast<int64_t>(passes.size()), count,
                              l.has_panels(kernels_, count), numbers_.data() + first,
                              Rows(l.at, l.call.family, count, l.is_shared() ? rows_ : mine.rows), odd};
        if (!l.is_shared()) {
            if (!l.has_layout) product.lay_out(0, product.pass_count);
        } else if (!l.has_layout) {
            if (first && team > 1) barrier_.wait(me, team);  // all are done with the rows before
            const Range part = part_of(product.pass_count, me, team);
            product.lay_out(part.from, part.to);
            if (team > 1) barrier_.wait(me, team);
        }
        product.tiles(tiles.from, tiles.to, mine.panel, mine.sums);
        for (int64_t r = 0; r < count && l.call.family != Q4_EXACT; ++r) {
            if (!odd[r]) continue;
            const Product again{m, l.at, l.exact, kernels_, &l.one, 1, 1, false, numbers_.data() + first + r,
                                Rows(l.at, Q4_EXACT, 1, mine.exact), &mine.exact_odd};
            again.lay_out(0, 1);
            again.tiles(tiles.from, tiles.to, nullptr, nullptr);
        }
    }
}

void q4_program::perform(const q4::Bound& b, int me, int team) {
    using namespace q4;
    const q4_step& s = b.step;
    const q4_view &x = s.inputs[0], &other = s.inputs[1], &y = s.outputs[0];
    const bool has_columns = split_of(s) == Split::COLUMNS;
    const Range rows = has_columns ? Range{0, y.rows} : part_of(x.rows, me, team);
    Range columns{0, y.columns};
    if (has_columns) {
        const Range tiles = part_of(ceil_div(y.columns, kColumns), me, team);
        columns = {tiles.from * kColumns, std::min(y.columns, tiles.to * kColumns)};
    }
    const int64_t from = columns.from, width = columns.to - columns.from;
    if (b.linear) return linear(*b.linear, me, team);
    if (width <= 0) return;
    for (int64_t r = rows.from; r < rows.to; ++r) {
        const auto* in = row<const float>(x, r);
        auto* out = row<float>(y, r);
        switch (s.op) {
        case Q4_EMBEDDING:
            if (s.layer)
                decode_row(*s.layer, kernels_, b.indices[r], from, columns.to, out);
            else
                std::copy_n(row<const float>(other, b.indices[r]) + from, width, out + from);
            break;
        case Q4_LINEAR:
            for (int64_t n = from; n < columns.to; ++n) {
                out[n] = do_.dot(in, row<const float>(other, n), x.columns);
                if (s.input_count == 3) out[n] += row<const float>(s.inputs[2], 0)[n];
            }
            break;
        case Q4_RMS_NORM:
            do_.rms_norm(in, row<const float>(other, 0), static_cast<float>(s.numbers[0]), static_cast<float>(s.numbers[1]),
                         x.columns, from, columns.to, out);
            break;
        case Q4_LAYER_NORM:
            do_.layer_norm(in, row<const float>(other, 0), row<const float>(s.inputs[2], 0), static_cast<float>(s.numbers[0]),
                           x.columns, from, columns.to, out);
            break;
        case Q4_ROTARY:
            turn(in, row<const float>(other, *b.indices), other.columns, x.columns, s.numbers[0] == 1.0, out);
            break;
        case Q4_STORE: std::copy_n(in, x.columns, row<float>(y, r * b.range + *b.indices)); break;
        case Q4_ATTENTION: {
            const auto window = static_cast<int64_t>(s.numbers[2]), kv_heads = static_cast<int64_t>(s.numbers[0]);
            const int64_t first = window ? std::max<int64_t>(0, *b.indices + 1 - window) : 0;
            const int64_t head = r / (x.rows / kv_heads) * b.range + first;
            const q4_view& values = s.inputs[2];
            do_.attend({in, row<const float>(other, head), row<const float>(values, head), other.stride, values.stride, x.columns,
                        *b.indices + 1 - first, static_cast<float>(s.numbers[1]),
                        threads_memory_[static_cast<size_t>(me)].scores, out});
            break;
        }
        case Q4_ADD:
        case Q4_MULTIPLY:
            do_.combine(s.op == Q4_ADD, in + from, row<const float>(other, other.rows == 1 ? 0 : r) + from, out + from, width);
            break;
        case Q4_AFFINE:
            do_.affine(in + from, static_cast<float>(s.numbers[0]), static_cast<float>(s.numbers[1]), out + from, width);
            break;
        case Q4_SOFTMAX: do_.softmax(in, out, x.columns); break;
        case Q4_COPY: std::copy_n(in + from, width, out + from); break;
        case Q4_ARGMAX: do_.largest(in, x.columns, 1, nullptr, row<int64_t>(y, 0) + r); break;
        case Q4_TOP_K:
            do_.largest(in, x.columns, static_cast<int64_t>(s.numbers[0]), out, row<int64_t>(s.outputs[1], r));
            break;
        default: do_.activate(s.op, in + from, out + from, width);
        }
    }
}

extern "C" int32_t q4_cpu_program_make(const q4_step* steps, int64_t count, int32_t threads, int32_t isa, q4_program** program) {
    if (!steps || !program || !q4::is_size(count) || threads < 1 || q4_cpu_has_isa(isa) != 1) return -1;
    for (int64_t i = 0; i < count; ++i) {
        if (!q4::is_sound(steps[i])) return static_cast<int32_t>(i) + 1;
        // What a step gives can't be looked at before the run.
        const q4::Indices at(steps[i]);
        for (int64_t j = 0; at.input >= 0 && j < i; ++j)
            for (int o = 0; o < steps[j].output_count; ++o)
                if (q4::overlap({steps[j].outputs[o], q4::has_int64_output(steps[j], o) ? 8 : 4}, {steps[i].inputs[at.input], 8}))
                    return static_cast<int32_t>(i) + 1;
    }
    q4::watch_forks();
    try {
        *program = new q4_program(steps, count, q4::team_size(q4::kMostThreads, threads), *q4::kernels_of(isa));
    } catch (...) {
        return -2;
    }
    return 0;
}

extern "C" int32_t q4_cpu_program_run(q4_program* program, int32_t threads) {
    return program && threads > 0 ? program->run(threads) : -1;
}

extern "C" void q4_cpu_program_free(q4_program* program) { delete program; }
