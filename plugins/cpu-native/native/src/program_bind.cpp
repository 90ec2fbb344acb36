// Binding: which part of each step a thread does, where the team must meet, and the memory that runs need.
#include "program.hpp"

namespace q4 {

// What a step reads or writes, and which part of it a thread does.
struct Access {
    Span span;
    q4_view view;
    bool is_write, is_whole, is_alone;  // whole: any thread may touch any of it
    Split split;
    int64_t slots = 0, slot = 0;  // of a ring, and which of them it is, where only one is touched

    // Whether nothing has to happen between this access and a later one.
    bool allows(const Access& later) const {
        if ((!is_write && !later.is_write) || (is_alone && later.is_alone) || !overlap(span, later.span)) return true;
        if (slots && slots == later.slots && is_same(view, later.view) && (slot - later.slot) % slots) return true;
        return !is_alone && !later.is_alone && !is_whole && !later.is_whole && split == later.split && is_same(view, later.view);
    }
};

namespace {

// A step that takes less on one thread is not worth a barrier; a wait between two cores takes about 0.3 µs.
constexpr double kSmallNs = 600.0;

Span span_of(const q4_stream& s) { return Span({s.data, 1, s.bytes, s.bytes}, 1); }

// Call use(is_input, number, view, bytes of an element) for each view of a step.
template <class Use> void each_view(const q4_step& s, const Use& use) {
    for (int i = 0; i < s.input_count; ++i) use(true, i, s.inputs[i], input_bytes(s, i));
    for (int o = 0; o < s.output_count; ++o) use(false, o, s.outputs[o], output_bytes(s, o));
}

// Whether each view lies in a stream, whole, or outside of all; and whether the operation may have such views.
bool fits(const q4_step& s, const q4_stream* streams, int64_t count) {
    bool does = true;
    each_view(s, [&](bool is_input, int i, const q4_view& v, int element) {
        const Span view(v, element);
        for (int64_t k = 0; k < count; ++k) {
            const Span stream = span_of(streams[k]);
            if (!overlap(view, stream)) continue;
            does = does && view.first >= stream.first && view.last <= stream.last && !(is_input && has_int64_input(s, i)) &&
                   s.op != Q4_LINEAR && s.op != Q4_EMBEDDING;
        }
    });
    return does;
}

double cost_ns(const Bound& b) {
    const q4_step& s = b.step;
    const q4_view& x = s.inputs[0];
    const auto rows = static_cast<double>(x.rows), size = rows * static_cast<double>(x.columns);
    if (b.linear) return static_cast<double>(b.linear->at.tiles * b.linear->at.tile_bytes) * (1.0 + rows / 4.0) / 20.0;
    if (s.op == Q4_LINEAR) return size * static_cast<double>(s.outputs[0].columns) / 8.0;
    if (s.op == Q4_EMBEDDING) return static_cast<double>(s.outputs[0].rows * s.outputs[0].columns);
    if (s.op == Q4_ATTENTION || s.op == Q4_ATTEND_SPANS) return size * static_cast<double>(s.inputs[1].rows) / 8.0;
    // Of one source in 100 that fires; and an event takes 4 ns.
    if (s.op == Q4_SPIKES) return static_cast<double>(s.layer->matrix.rows) * static_cast<double>(s.layer->matrix.columns) * 0.01;
    if (s.op == Q4_SEND) return static_cast<double>(s.synapses->entries) * 0.01 * 4.0;
    return is_activation(s.op) || (s.op >= Q4_SOFTMAX && s.op != Q4_MEAN_SPANS) ? size : size / 8.0;
}

}  // namespace
}  // namespace q4

q4_program::q4_program(const q4_step* steps, int64_t count, int threads, int64_t* clock, const q4_stream* streams, int64_t stream_count,
                       const q4::Kernels& kernels)
    : kernels_(kernels), do_(*kernels.operations), threads_(threads), clock_(clock), elements_(static_cast<size_t>(stream_count), 4),
      barrier_(threads) {
    using namespace q4;
    bound_.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        Bound b{steps[i], split_of(steps[i]), nullptr};
        if (is_spiking(b.step.op)) unit_ = 64;
        b.has_columns = b.split == Split::COLUMNS;
        each_view(b.step, [&](bool is_input, int view, const q4_view& v, int element) {
            for (int stream = 0; stream < stream_count; ++stream) {
                if (!overlap(Span(v, element), span_of(streams[stream]))) continue;
                const int64_t offset = static_cast<const uint8_t*>(v.data) - static_cast<const uint8_t*>(streams[stream].data);
                b.moving.push_back({is_input, view, stream, offset});
                int& wide = elements_[static_cast<size_t>(stream)];
                wide = std::max(wide, element);
            }
        });
        const int ticking = clock_input(b.step);
        b.ticks = ticking >= 0 && clock && b.step.inputs[ticking].data == clock;
        if (b.step.op == Q4_SPIKES) {
            b.sender = std::make_unique<Sender>();
            Sender& s = *b.sender;
            s.layer = *b.step.layer;
            const q4_matrix& m = s.layer.matrix;
            const Layout at(m);
            s.kernel = kernels.spikes(m);
            for (int64_t column = 0; column < m.columns; ++column) s.places.push_back(place_of(m, at, column));
        }
        if (b.step.op == Q4_SEND) {
            b.sender = std::make_unique<Sender>();
            Sender& s = *b.sender;
            s.synapses = *b.step.synapses;
            s.cuts.resize(static_cast<size_t>(s.synapses.sources * (threads + 1)));
            s.targets.resize(static_cast<size_t>(s.synapses.sources * threads));
        }
        if (b.step.op == Q4_LINEAR && b.step.layer) b.linear = std::make_unique<Linear>(b.step, kernels, threads);
        if (i && b.linear && bound_.back().linear) b.linear->has_layout = b.linear->takes_layout_of(*bound_.back().linear);
        bound_.push_back(std::move(b));
    }
    assign_splits();
    take_memory();
}

std::vector<q4::Access> q4_program::accesses(const q4::Bound& b, int64_t round) const {
    using namespace q4;
    const q4_step& s = b.step;
    std::vector<Access> out;
    const bool is_alone = b.split == Split::ALONE;
    const auto add = [&](const q4_view& v, int size, bool is_write, bool is_whole, RingUse ring = {}) {
        out.push_back({Span(v, size), v, is_write, is_whole, is_alone, b.split});
        if (ring.rows && b.ticks) out.back().slots = v.rows / ring.rows, out.back().slot = round - ring.lag;
    };
    const bool is_product = s.op == Q4_LINEAR || s.op == Q4_EMBEDDING;
    for (int i = 0; i < s.input_count; ++i) {
        if (has_int64_input(s, i)) continue;  // copied before the run
        const bool is_beside = i > 0 && s.op != Q4_ADD && s.op != Q4_MULTIPLY;
        const bool is_norm = s.op == Q4_RMS_NORM || s.op == Q4_LAYER_NORM;
        // All bits are read by each thread; vectors are never written; everything else of neurons is each thread's own.
        const bool is_spread = s.op == Q4_ATTENTION || s.op == Q4_ATTEND_SPANS;  // by tokens or by blocks of keys
        const bool is_whole = is_spiking(s.op) ? s.op == Q4_SPIKES || (s.op == Q4_SEND && i == 0)
                                               : is_product || is_beside || is_spread || (is_norm && b.split == Split::COLUMNS);
        add(s.inputs[i], input_bytes(s, i), false, is_whole, ring_use(s, true, i));
    }
    for (int i = 0; i < s.output_count; ++i)
        add(s.outputs[i], output_bytes(s, i), true, s.op == Q4_STORE || s.op == Q4_ARGMAX || s.op == Q4_ATTEND_SPANS || (s.op == Q4_ATTENTION && tokens_of(s) > 1), ring_use(s, false, i));
    if (s.op == Q4_ATTENTION) {  // states of blocks, which stand for another byte
        const q4_view states{const_cast<Line*>(memory_.data())->bytes + 1, 1, 1, 1};
        add(states, 1, true, true);
    }
    if (b.linear && b.linear->is_shared) {  // the rows as laid out, which stand for one byte here
        const q4_view rows{const_cast<Line*>(memory_.data()), 1, 1, 1};
        add(rows, 1, !b.linear->has_layout, true);
    }
    return out;
}

// Find before which steps the team must meet. With a clock, rounds follow one another: the second meets what the first did. What
// is more than a round ago is past a meeting, where there is one.
void q4_program::link() {
    using namespace q4;
    std::vector<Access> since;
    for (Bound& b : bound_) b.waits = false;
    for (int64_t round = 0; round < (clock_ ? 2 : 1); ++round)
        for (Bound& b : bound_) {
            const std::vector<Access> mine = accesses(b, round);
            for (const Access& earlier : since)
                for (const Access& later : mine) b.waits |= !earlier.allows(later);
            if (b.waits) since.clear();
            since.insert(since.end(), mine.begin(), mine.end());
        }
    bool meets = !clock_;
    for (const Bound& b : bound_) meets = meets || b.waits;
    for (Access& access : since) access.slots = 0;
    for (const Access& earlier : since)
        for (const Access& later : since)
            if (!meets && !earlier.allows(later)) bound_[0].waits = true;
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
    int64_t spikes = 0, shared = 0, odd = 0, rows = 0, exact = 0, sums = 0, queries = 0, padded = 0, states = 0, indices = 0, numbers = 1;
    bool has_panels = false;
    for (const Bound& b : bound_) {
        const q4_step& s = b.step;
        if (s.op == Q4_ATTENTION || s.op == Q4_ATTEND_SPANS) {
            const bool is_spans = s.op == Q4_ATTEND_SPANS;
            const int64_t heads = is_spans ? static_cast<int64_t>(s.numbers[0]) : 1, columns = s.inputs[0].columns / heads;
            queries = std::max(queries, std::min<int64_t>(Attention::kMost, s.inputs[0].rows * heads));
            padded = std::max(padded, Attention::padded(columns));
            const int64_t blocks = is_spans ? 0 : Attention::blocks(s.inputs[1].rows / static_cast<int64_t>(s.numbers[0]));
            if (blocks > 1 && threads_ > 1) states = std::max(states, lines(s.inputs[0].rows / tokens_of(s) * blocks * Attention::state_size(columns) * 4));
        }
        const Indices at(s);
        if (at.input >= 0) indices += s.inputs[at.input].columns;
        if (s.op == Q4_SPIKES) spikes = std::max(spikes, lines(b.sender->layer.matrix.columns * static_cast<int64_t>(sizeof(Spike))));
        if (!b.linear) continue;
        const Linear& l = *b.linear;
        const int64_t bytes = std::max(Rows::bytes(l.at, l.call.family, l.batch), Rows::bytes(l.at, l.call.family, 1));
        if (l.is_shared)
            shared = std::max(shared, lines(bytes)), odd = std::max(odd, lines(l.batch));
        else
            rows = std::max(rows, lines(bytes));
        exact = std::max(exact, lines(Rows::bytes(l.at, Q4_EXACT, 1)));
        numbers = std::max(numbers, l.call.x_rows);
        if (!l.has_panels(kernels_, l.batch)) continue;
        has_panels = true;
        sums = std::max(sums, l.batch);
    }
    const int64_t state = lines(Attention::state_size(padded) * 4), whole = lines(padded * 4), tile = kTileKeys * whole;
    const int64_t attention = queries ? queries * (lines(Attention::kRoom * 4) + 2 * state + whole) + 2 * tile : 0;
    const int64_t each = rows + exact + sums + attention + spikes + 1;  // a line between two threads
    memory_ = std::vector<Line>(static_cast<size_t>(shared + odd + states + each * threads_ + 1));
    if (has_panels) panels_.resize(static_cast<size_t>(threads_));
    Line* next = memory_.data();
    const auto take = [&](int64_t count) {
        uint8_t* place = next->bytes;
        next += count;
        return place;
    };
    const auto take_floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count)); };
    rows_ = take(shared), odd_ = take(odd), states_ = take_floats(states);
    for (int i = 0; i < threads_; ++i) {
        Thread t{};
        t.rows = take(rows), t.exact = take(exact);
        t.sums = take_floats(sums);
        if (queries) {
            t.attention.scores = take_floats(queries * lines(Attention::kRoom * 4)), t.attention.states = take_floats(queries * state);
            t.attention.queries = take_floats(queries * whole), t.states = take_floats(queries * state);
            t.attention.tile = take_floats(tile), t.attention.transposed = take_floats(tile);
        }
        take(1);
        t.spikes = reinterpret_cast<Spike*>(take(spikes));
        t.panel = has_panels ? &panels_[static_cast<size_t>(i)] : nullptr;
        threads_memory_.push_back(t);
    }
    indices_.resize(static_cast<size_t>(indices) + 1);
    numbers_.resize(static_cast<size_t>(numbers));
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i] = static_cast<int64_t>(i);
    int64_t* place = indices_.data();
    for (Bound& b : bound_) {
        const Indices at(b.step);
        b.indices = place, b.range = at.range;
        if (at.input >= 0) place += b.step.inputs[at.input].columns;
    }
}

bool q4_program::take_tokens(const int64_t* tokens, int64_t most) {
    using namespace q4;
    if (!elements_.empty()) return false;
    std::vector<Size> sizes;
    const auto add = [&](int64_t& value) {
        sizes.push_back({&value, value / most});
        return value % most == 0;
    };
    for (Bound& b : bound_) {
        q4_step& s = b.step;
        if (s.op > Q4_ARGMAX && spans_input(s) < 0) return false;
        for (int i = 0; i < s.input_count; ++i) {
            const bool is_other = (s.op == Q4_ADD || s.op == Q4_MULTIPLY) && i == 1 && s.inputs[1].rows > 1;
            if (has_int64_input(s, i) ? !add(s.inputs[i].columns) : ((i == 0 && s.op != Q4_MEAN_SPANS) || is_other) && !add(s.inputs[i].rows)) return false;
        }
        if (s.op != Q4_STORE && !add(s.op == Q4_ARGMAX ? s.outputs[0].columns : s.outputs[0].rows)) return false;
    }
    for (Bound& b : bound_)
        if (b.linear) b.linear->reserve(kernels_);
    sizes_ = std::move(sizes), tokens_ = tokens, most_tokens_ = sized_ = most;
    return true;
}

void q4_program::resize(int64_t tokens) {
    using namespace q4;
    if (tokens == sized_) return;
    for (const Size& size : sizes_) *size.value = size.each * tokens;
    for (Bound& b : bound_)
        if (b.linear) b.linear->resize(kernels_, b.step.inputs[0].rows);
    sized_ = tokens;
}

extern "C" int32_t q4_cpu_program_tokens(q4_program* program, const int64_t* tokens, int64_t most) {
    if (!program || !tokens || reinterpret_cast<uintptr_t>(tokens) % 8 || most < 2 || !q4::is_size(most)) return -1;
    try {
        return program->take_tokens(tokens, most) ? 0 : -1;
    } catch (...) {
        return -2;
    }
}

extern "C" int32_t q4_cpu_program_make(const q4_step* steps, int64_t count, int32_t threads, int32_t isa, int64_t* clock,
                                       const q4_stream* streams, int64_t stream_count, q4_program** program) {
    if (stream_count < 0 || stream_count > q4::kMostStreams || (stream_count && !streams)) return -1;
    for (int64_t i = 0; i < stream_count; ++i)
        if (!streams[i].data || !q4::is_size(streams[i].bytes)) return -1;
    if (!steps || !program || (clock && reinterpret_cast<uintptr_t>(clock) % 8) || !q4::is_size(count) || threads < 1 || q4_cpu_has_isa(isa) != 1) return -1;
    for (int64_t i = 0; i < count; ++i) {
        if (!q4::is_sound(steps[i]) || !q4::fits(steps[i], streams, stream_count)) return static_cast<int32_t>(i) + 1;
        // What a step gives can't be looked at before the run.
        const q4::Indices at(steps[i]);
        for (int64_t j = 0; at.input >= 0 && j < i; ++j)
            for (int o = 0; o < steps[j].output_count; ++o)
                if (q4::overlap({steps[j].outputs[o], q4::output_bytes(steps[j], o)}, {steps[i].inputs[at.input], 8}))
                    return static_cast<int32_t>(i) + 1;
    }
    q4::watch_forks();
    try {
        *program = new q4_program(steps, count, q4::team_size(q4::kMostThreads, threads), clock, streams, stream_count, *q4::kernels_of(isa));
    } catch (...) {
        return -2;
    }
    return 0;
}
