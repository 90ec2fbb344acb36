// Running: each thread's part of each step.
#include <cstring>

#include "program.hpp"

namespace q4 {
namespace {

template <class T> T* row(const q4_view& v, int64_t r) { return static_cast<T*>(v.data) + r * v.stride; }

// Keys or values from a row on, of `bytes` each, and from a column on.
Cache cache_from(const q4_view& v, int64_t r, int bytes, int32_t type, int64_t column = 0) {
    return {static_cast<const uint8_t*>(v.data) + (r * v.stride + column) * bytes, v.stride * bytes, type};
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
        int32_t large;
        kernels.widen(one, type, wide, &large);
        return wide[0];
    };
    for (int64_t first = from; first < to; first += kChunk / 2) {  // half a chunk, of one block
        const int64_t chunk = first / kChunk;
        const int set = at.sets == 2 ? static_cast<int>(first / (kChunk / 2) % 2) : 0;
        const uint8_t* group = tile + at.group_offset(chunk / at.group_chunks);
        const uint8_t* codes = group + at.head_bytes + chunk % at.group_chunks * at.chunk_bytes;
        float scale = number(group + at.scale_offset(set, r), m.scale_type), second = 0.0f;
        const uint8_t* super = tile + at.super_offset(chunk / at.group_chunks) + 2 * r;
        if (at.supers) scale *= number(super, Q4_F16);
        if (l.global_scale) {
            const float global = l.global_scale[l.global_count > 1 ? n : 0];
            scale = l.global_divides ? scale / global : scale * global;
        }
        if (m.second != Q4_NONE) second = number(group + at.second_offset(set, r), m.second_type);
        if (m.second == Q4_OFFSET && at.supers) second *= number(super + 2 * kTileRows, Q4_F16);
        for (int64_t k = first; k < std::min(to, first + kChunk / 2); ++k) {
            const auto j = static_cast<int>(k % kChunk);
            const int code = held_code(m.held_bits, codes, r, j);
            float value;
            if (is_held_short(m))
                value = static_cast<float>(code + m.first) - m.center;
            else if (m.bits == 8)
                value = static_cast<float>(static_cast<int8_t>(code)) + byte_base(m);
            else
                value = m.codebook[code];
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

// Rounds after which a team looks again whether sharing pays: another process may have taken a core.
static constexpr int64_t kRounds = 64;

// Copy tokens and positions, so that what is checked is what is used.
int32_t q4_program::read_indices() {
    for (size_t i = 0; i < bound_.size(); ++i) {
        const q4::Indices at(bound_[i].step);
        if (at.input < 0) continue;
        const q4_view& v = bound_[i].step.inputs[at.input];
        int64_t* to = bound_[i].indices;
        std::memcpy(to, v.data, static_cast<size_t>(v.columns) * 8);
        for (int64_t j = 0; j < v.columns; ++j)
            if (to[j] < 0 || to[j] >= at.range) return static_cast<int32_t>(i) + 1;
        for (int64_t j = 0; q4::spans_input(bound_[i].step) >= 0 && j < v.columns; j += 2)
            if (to[j] >= to[j + 1]) return static_cast<int32_t>(i) + 1;
    }
    return 0;
}

// Have views where this run's streams are; false where one of these makes no sense.
bool q4_program::take_streams(const q4_stream* streams) {
    if (elements_.empty()) return true;
    for (size_t i = 0; i < elements_.size(); ++i) {
        if (!streams || !streams[i].data || reinterpret_cast<uintptr_t>(streams[i].data) % static_cast<uintptr_t>(elements_[i]) ||
            streams[i].step % elements_[i])
            return false;
    }
    for (q4::Bound& b : bound_) {
        b.moves = false;
        for (q4::Moving& m : b.moving) {
            const q4_stream& stream = streams[m.stream];
            m.of(b.step).data = static_cast<uint8_t*>(stream.data) + m.offset;
            m.step = stream.step;
            b.moves = b.moves || m.step;
        }
    }
    return true;
}

// Run some rounds on a team, or alone where sharing does not pay now.
void q4_program::share(int threads, int64_t first, int64_t last) {
    using namespace q4;
    const bool shares = may_share(threads);
    const int64_t start = shares ? now_ns() : 0;
    const bool is_alone = !shares || g_patience.is_alone(start);
    for (Bound& b : bound_)
        if (b.sender && b.step.op == Q4_SEND) cut(*b.sender, b.step.outputs[0].columns, is_alone || b.split == Split::ALONE ? 1 : threads);
    if (is_alone) {
        const FloatMode plain;
        work(0, 1, first, last);
        return;
    }
    barrier_.reset();
    run_team(threads, [this, first, last](int64_t one, int64_t team) {
        const FloatMode plain;
        work(static_cast<int>(one), static_cast<int>(team), first, last);
    });
    // Waiting for a quarter of its own time, of hundreds of barriers, is no imbalance.
    const int64_t end = now_ns(), done = end - barrier_.waited_ns();
    g_patience.judge(done - (done - start) / 4, done, end);
}

int32_t q4_program::run(int threads, int64_t rounds, const q4_stream* streams, const q4_turns* turns) {
    using namespace q4;
    const int32_t me = g_forks.load(std::memory_order_relaxed) + 1;
    int32_t runner = runner_.load();
    if (runner == me || !runner_.compare_exchange_strong(runner, me)) return -3;
    const int64_t tokens = tokens_ ? *tokens_ : 0;
    const bool has_tokens = !tokens_ || (tokens >= 1 && tokens <= most_tokens_);
    if (tokens_ && has_tokens) resize(tokens);
    const int32_t status = !has_tokens ? -4 : take_streams(streams) ? read_indices() : -1;
    if (status == 0) {
        threads = is_shared_ ? std::min(threads, threads_) : 1;
        turns_ = turns, rounds_ = rounds, done_ = 0, is_over_ = false;
        for (int64_t first = 0; first < rounds && !is_over_; first += kRounds) share(threads, first, std::min(rounds, first + kRounds));
        if (turns && !is_over_) turns->turn(turns->context, rounds, rounds);
        if (clock_) *clock_ += done_;
    }
    runner_.store(0);
    return status;
}

// What happens between rounds, while all other threads wait; whether the next one may be run.
bool q4_program::take_turn(int me, int team, int64_t round) {
    if (team > 1) barrier_.wait(me, team);
    if (me == 0) is_over_ = turns_->turn(turns_->context, round, rounds_) != 0;
    if (team > 1) barrier_.wait(me, team);
    return !is_over_;
}

void q4_program::work(int me, int team, int64_t first, int64_t last) {
    using namespace q4;
    int64_t round = first;
    for (; round < last && (!turns_ || take_turn(me, team, round)); ++round)
        for (const Bound& b : bound_) {
            // Asking for the next tiles here (2, 8 and 16 KiB of them) gave less than 1 %, and was left out.
            if (b.waits && team > 1) barrier_.wait(me, team);
            if (b.split != Split::ALONE)
                perform(b, me, team, round);
            else if (me == 0)
                perform(b, 0, 1, round);
        }
    if (me == 0) done_ = round;
    if (team > 1) barrier_.wait(me, team);  // spinning is shorter than what ends a team, and is counted
}

q4::Range q4_program::part_of_columns(int64_t columns, int me, int team) const {
    const q4::Range units = q4::part_of(q4::ceil_div(columns, unit_), me, team);
    return {units.from * unit_, std::min(columns, units.to * unit_)};
}

void q4_program::linear(q4::Linear& l, int me, int team) {
    using namespace q4;
    Thread& mine = threads_memory_[static_cast<size_t>(me)];
    const q4_matrix& m = l.layer.matrix;
    const Range own = part_of_columns(m.rows, me, team), tiles{own.from / kTileRows, ceil_div(own.to, kTileRows)};
    for (int64_t first = 0; first < l.call.x_rows; first += l.batch) {
        const int64_t count = std::min(l.batch, l.call.x_rows - first);
        const std::vector<Pass>& passes = count == l.batch ? l.passes : l.last;
        uint8_t* odd = l.is_shared ? odd_ : &mine.odd;
        const Product product{m, l.at, l.call, kernels_, passes.data(), static_cast<int64_t>(passes.size()), count,
                              l.has_panels(kernels_, count), numbers_.data() + first,
                              Rows(l.at, l.call.family, count, l.is_shared ? rows_ : mine.rows), odd};
        if (!l.is_shared) {
            if (!l.has_layout) product.lay_out(0, product.pass_count);
        } else if (!l.has_layout) {
            if (first && team > 1) barrier_.wait(me, team);  // all have finished the rows before
            const Range part = part_of(product.pass_count, me, team);
            product.lay_out(part.from, part.to);
            if (team > 1) barrier_.wait(me, team);
        }
        if (me == 0) l.outlier_rows = (first ? l.outlier_rows : 0) + product.rows.count_outliers(count);
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

q4::Attention q4_program::attention_of(const q4_step& s, int64_t columns, int me) {
    using namespace q4;
    Attention a;
    a.columns = columns, a.scale = static_cast<float>(s.numbers[s.op == Q4_ATTENTION ? 1 : 2]);
    a.scratch = threads_memory_[static_cast<size_t>(me)].attention;
    return a;
}

// All blocks of rows that are taken together; query(i) returns the row's numbers, where its result goes, and its keys.
template <class Query> void q4_program::attend_rows(q4::Attention& a, int64_t from, int64_t to, int me, const Query& query) {
    using namespace q4;
    const int64_t size = Attention::state_size(a.columns);
    float *states = threads_memory_[static_cast<size_t>(me)].states, *out[Attention::kMost];
    a.count = 0, a.from = 0, a.to = 1;
    for (int64_t i = from; i < to; ++i) {
        const auto [x, y, first, end] = query(i);
        out[a.count] = y, a.each[a.count] = {x, states + a.count * size, first, end};
        ++a.count, a.to = std::max(a.to, Attention::blocks(end - first));
    }
    do_.attend(a);
    for (int n = 0; n < a.count; ++n) do_.conclude(a.each[n].state, a.columns, out[n]);
}

namespace q4 {
namespace {

struct Query {
    const float* x;
    float* y;
    int64_t first, end;
};

// The end of the rows from `from` on, of `most` and up to `last`, whose keys are taken together: span(i) is the first one and behind
// the last one. Where `meet`, all of them have a key in common.
template <class SpanOf> int64_t together(int64_t from, int64_t last, int64_t most, bool meet, const SpanOf& span) {
    auto [first, end] = span(from);
    int64_t low = first, to = from + 1;
    for (; to < std::min(last, from + most); ++to) {
        const Range next = span(to);
        low = std::min(low, next.from), first = std::max(first, next.from), end = std::min(end, next.to);
        if (first - low > Attention::kApart || (meet && first >= end)) break;
    }
    return to;
}

// Of so many rows that a team shares, how many to take together: some parts for each thread, of whole tokens.
int64_t most_together(int64_t rows, int64_t shares, int team) {
    const int64_t part = team == 1 ? Attention::kMost : std::clamp<int64_t>(rows / (4 * team), 12, Attention::kMost);
    return std::max<int64_t>(1, part / shares) * std::min<int64_t>(shares, Attention::kMost);
}

}  // namespace
}  // namespace q4

// Queries of one head of keys are taken together. Those of several tokens are divided by turns: the later a token, the more keys it
// sees.
void q4_program::attend(const q4::Bound& b, const q4_step& s, int me, int team) {
    using namespace q4;
    const q4_view &x = s.inputs[0], &keys = s.inputs[1], &values = s.inputs[2];
    const auto kv_heads = static_cast<int64_t>(s.numbers[0]), window = static_cast<int64_t>(s.numbers[2]);
    const int64_t tokens = tokens_of(s), heads = x.rows / tokens, shares = heads / kv_heads, each = tokens * shares;
    Attention a = attention_of(s, x.columns, me);
    const auto span = [&](int64_t i) {
        const int64_t end = b.indices[i % each / shares] + 1;
        return Range{window ? std::max<int64_t>(0, end - window) : 0, end};
    };
    const auto query = [&](int64_t i) {
        const int64_t r = i % each / shares * heads + i / each * shares + i % shares;
        return Query{row<const float>(x, r), row<float>(s.outputs[0], r), span(i).from, span(i).to};
    };
    const auto take_head = [&](int64_t head) {
        a.keys = cache_from(keys, head * b.range, cache_bytes(s), s.cache_type);
        a.values = cache_from(values, head * b.range, cache_bytes(s), s.cache_type);
    };
    const Range seen = span(0);
    const int64_t blocks = Attention::blocks(seen.to - seen.from);
    if (tokens > 1 || team == 1 || blocks == 1) {
        const Range own = tokens == 1 ? part_of(x.rows, me, team) : Range{0, x.rows};
        const int64_t most = tokens == 1 ? Attention::kMost : most_together(x.rows, shares, team);
        int64_t turn = 0;
        for (int64_t from = own.from, to; from < own.to; from = to) {
            to = together(from, std::min(own.to, (from / each + 1) * each), most, false, span);
            if (tokens > 1 && turn++ % team != me) continue;
            take_head(from / each);
            attend_rows(a, from, to, me, query);
        }
        return;
    }
    // Of one token, blocks of keys are shared: each is read by one thread, for all queries of its head.
    const int64_t size = Attention::state_size(a.columns), total = kv_heads * (seen.to - seen.from);
    const auto state = [&](int64_t r, int64_t block) { return states_ + (r * Attention::blocks(b.range) + block) * size; };
    for (int64_t head = 0, before = 0; head < kv_heads; ++head)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t count = std::min(Attention::kBlock, seen.to - seen.from - block * Attention::kBlock);
            const int64_t owner = (before + count / 2) * team / total;
            before += count;
            if (owner != me) continue;
            take_head(head);
            a.from = block, a.to = block + 1;
            for (int64_t i = 0; i < shares; i += a.count) {
                for (a.count = 0; a.count < Attention::kMost && i + a.count < shares; ++a.count) {
                    const int64_t r = head * shares + i + a.count;
                    a.each[a.count] = {row<const float>(x, r), state(r, block), seen.from, seen.to};
                }
                do_.attend(a);
            }
        }
    barrier_.wait(me, team);
    const Range own = part_of(x.rows, me, team);
    for (int64_t r = own.from; r < own.to; ++r) {
        for (int64_t block = 1; block < blocks; ++block) do_.join(state(r, block), state(r, 0), a.columns);
        do_.conclude(state(r, 0), a.columns, row<float>(s.outputs[0], r));
    }
}

// The same of rows that each see a span of the keys. Rows whose spans have no key in common are not taken together.
void q4_program::attend_spans(const q4::Bound& b, const q4_step& s, int me, int team) {
    using namespace q4;
    const q4_view &x = s.inputs[0], &keys = s.inputs[1], &values = s.inputs[2];
    const auto heads = static_cast<int64_t>(s.numbers[0]), kv_heads = static_cast<int64_t>(s.numbers[1]);
    const int64_t shares = heads / kv_heads, columns = x.columns / heads, count = x.rows * shares;
    Attention a = attention_of(s, columns, me);
    const auto span = [&](int64_t i) { return Range{b.indices[i / shares * 2], b.indices[i / shares * 2 + 1]}; };
    const int64_t most = most_together(count * kv_heads, shares, team);
    const auto keys_of = [&](int64_t from, int64_t to) {
        int64_t sum = 0;
        for (int64_t i = from; i < to; ++i) sum += span(i).to - span(i).from;
        return sum;
    };
    // Each thread takes as many pairs of queries and keys: neighbouring ones, which share what they read.
    const int64_t total = kv_heads * keys_of(0, count);
    for (int64_t head = 0, before = 0; head < kv_heads; ++head) {
        a.keys = cache_from(keys, 0, 4, Q4_F32, head * columns);
        a.values = cache_from(values, 0, 4, Q4_F32, head * columns);
        for (int64_t from = 0, to; from < count; from = to) {
            to = together(from, count, most, true, span);
            const int64_t pairs = keys_of(from, to), owner = (before + pairs / 2) * team / total;
            before += pairs;
            if (owner != me) continue;
            attend_rows(a, from, to, me, [&](int64_t i) {
                const int64_t r = i / shares, place = (head * shares + i % shares) * columns;
                return Query{row<const float>(x, r) + place, row<float>(s.outputs[0], r) + place, span(i).from, span(i).to};
            });
        }
    }
}

void q4_program::mean_spans(const q4::Bound& b, const q4_step& s, q4::Range columns) {
    using namespace q4;
    const q4_view &x = s.inputs[0], &y = s.outputs[0];
    const int64_t width = columns.to - columns.from;
    for (int64_t r = 0; r < y.rows && width > 0; ++r) {
        const int64_t first = b.indices[2 * r], last = b.indices[2 * r + 1];
        auto* out = row<float>(y, r) + columns.from;
        std::copy_n(row<const float>(x, first) + columns.from, width, out);
        for (int64_t i = first + 1; i < last; ++i) do_.combine(true, out, row<const float>(x, i) + columns.from, out, width);
        if (last - first > 1) do_.affine(out, 1.0f / static_cast<float>(last - first), 0.0f, out, width);
    }
}

void q4_program::perform(const q4::Bound& b, int me, int team, int64_t round) {
    using namespace q4;
    q4_step moved;
    if (b.moves) {
        moved = b.step;
        for (const Moving& m : b.moving) {
            q4_view& v = m.of(moved);
            v.data = static_cast<uint8_t*>(v.data) + round * m.step;
        }
    }
    const q4_step& s = b.moves ? moved : b.step;
    const q4_view &x = s.inputs[0], &other = s.inputs[1], &y = s.outputs[0];
    const Range rows = b.has_columns ? Range{0, s.op == Q4_STORE ? x.rows : y.rows} : part_of(x.rows, me, team);
    const int64_t heads = x.rows / tokens_of(s);  // rows of a token
    if (is_spiking(s.op)) return spike(b, s, me, team, round);
    const Range columns = b.has_columns ? part_of_columns(y.columns, me, team) : Range{0, y.columns};
    const int64_t from = columns.from, width = columns.to - columns.from;
    if (b.linear) return linear(*b.linear, me, team);
    if (s.op == Q4_ATTENTION) return attend(b, s, me, team);
    if (s.op == Q4_ATTEND_SPANS) return attend_spans(b, s, me, team);
    if (s.op == Q4_MEAN_SPANS) return mean_spans(b, s, columns);
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
            turn(in, row<const float>(other, b.indices[r / heads]), other.columns, x.columns, s.numbers[0] == 1.0, out);
            break;
        case Q4_STORE: {
            const int64_t place = r % heads * b.range + b.indices[r / heads], bytes = cache_bytes(s);
            uint8_t* to = static_cast<uint8_t*>(y.data) + (place * y.stride + from) * bytes;
            do_.keep(in + from, std::min(width, x.columns - from), s.cache_type, to);
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

extern "C" int32_t q4_cpu_program_run(q4_program* program, int32_t threads, int64_t rounds, const q4_stream* streams,
                                      const q4_turns* turns) {
    return program && threads > 0 && rounds > 0 ? program->run(threads, rounds, streams, turns) : -1;
}

int64_t q4_program::outlier_rows(int64_t step) const {
    const bool is_step = step >= 0 && step < static_cast<int64_t>(bound_.size());
    return is_step && bound_[static_cast<size_t>(step)].linear ? bound_[static_cast<size_t>(step)].linear->outlier_rows : 0;
}

extern "C" int64_t q4_cpu_program_outlier_rows(const q4_program* program, int64_t step) {
    return program ? program->outlier_rows(step) : 0;
}

extern "C" void q4_cpu_program_free(q4_program* program) { delete program; }
