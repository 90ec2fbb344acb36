// Running steps of spiking networks: each thread has the targets of some words of 64 neurons.
#include <cstring>

#include "program.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace q4 {
namespace {

template <class T> T* row(const q4_view& v, int64_t r) { return static_cast<T*>(v.data) + r * v.stride; }

// The first row of a round's slot.
int64_t slot_of(int64_t ring_rows, int64_t rows, int64_t round, int64_t lag = 0) {
    const int64_t slots = ring_rows / rows, slot = (round - lag) % slots;
    return (slot < 0 ? slot + slots : slot) * rows;
}

Vector vector_of(const q4_view& v, int64_t r = 0) { return {row<const float>(v, v.rows == 1 ? 0 : r), v.columns == 1}; }

// Call use(place) for each bit of `count` that is 1, in order.
template <class Use> void each_bit(const uint64_t* words, int64_t count, const Use& use) {
    for (int64_t w = 0; w * 64 < count; ++w) {
        uint64_t word = words[w];
        if (count - w * 64 < 64) word &= (uint64_t{1} << (count - w * 64)) - 1;
        for (; word; word &= word - 1) use(w * 64 + __builtin_ctzll(word));
    }
}

// The bits of a byte as zeros and ones.
struct Floats {
    alignas(64) float of[256][8];
    Floats() {
        for (int byte = 0; byte < 256; ++byte)
            for (int bit = 0; bit < 8; ++bit) of[byte][bit] = static_cast<float>(byte >> bit & 1);
    }
};
const Floats kFloats;

// Where up to 64 numbers are not 0, and where they are neither 0 nor 1.
void pack(const float* x, int64_t count, uint64_t* ones, uint64_t* odd) {
    int64_t j = 0;
#if defined(__x86_64__)
    const __m128 zero = _mm_setzero_ps(), one = _mm_set1_ps(1.0f);
    for (; j + 4 <= count; j += 4) {
        const __m128 four = _mm_loadu_ps(x + j), is_set = _mm_cmpneq_ps(four, zero);
        *ones |= static_cast<uint64_t>(_mm_movemask_ps(is_set)) << j;
        *odd |= static_cast<uint64_t>(_mm_movemask_ps(_mm_and_ps(is_set, _mm_cmpneq_ps(four, one)))) << j;
    }
#endif
    for (; j < count; ++j) {
        *ones |= static_cast<uint64_t>(x[j] != 0.0f) << j;
        *odd |= static_cast<uint64_t>(x[j] != 0.0f && x[j] != 1.0f) << j;
    }
}

}  // namespace
}  // namespace q4

// Find where each source's entries are cut for a team.
void q4_program::cut(q4::Sender& s, int64_t targets, int team) {
    using namespace q4;
    if (s.team == team) return;
    const q4_synapses& of = s.synapses;
    for (int64_t source = 0; source < of.sources; ++source) {
        int64_t* cuts = &s.cuts[static_cast<size_t>(source * (team + 1))];
        int32_t* before = &s.targets[static_cast<size_t>(source * team)];
        int64_t entry = of.starts[source], target = of.first[source];
        const int64_t end = of.starts[source + 1];
        for (int me = 0; me < team; ++me) {
            cuts[me] = entry, before[me] = static_cast<int32_t>(target);
            const int64_t to = part_of_columns(targets, me, team).to;
            for (; entry < end; ++entry) {
                const int64_t gap = of.gap_bytes == 1 ? static_cast<const uint8_t*>(of.gaps)[entry] : static_cast<const uint16_t*>(of.gaps)[entry];
                if (target + gap >= to) break;
                target += gap;
            }
        }
        cuts[team] = end;
    }
    s.team = team;
}

void q4_program::multiply_spikes(const q4::Bound& b, const q4_step& step, const uint64_t* bits, q4::Range columns, int me, int64_t r) {
    using namespace q4;
    const Sender& s = *b.sender;
    const q4_matrix& m = s.layer.matrix;
    const Layout at(m);
    Spike* const spikes = threads_memory_[static_cast<size_t>(me)].spikes;
    int64_t count = 0, last_half = -1;
    const auto add = [&](int64_t column) {
        Spike& spike = spikes[count];
        static_cast<Place&>(spike) = s.places[static_cast<size_t>(column)];
        const int64_t half = column / 16;
        spike.keep = half == last_half ? 1.0f : 0.0f;
        spike.ends = 1.0f;
        if (half == last_half) spikes[count - 1].ends = 0.0f;
        last_half = half;
        ++count;
    };
    const int64_t known = std::min(m.columns, step.inputs[0].columns * 64);
    if (const int64_t* order = s.layer.inputs.order) {
        for (int64_t column = 0; column < m.columns; ++column)
            if (order[column] >= 0 && order[column] < known && (bits[order[column] / 64] >> order[column] % 64 & 1)) add(column);
    } else {
        each_bit(bits, known, add);
    }
    Finish f{};
    f.step = 1.0f;
    f.is_global_per_row = s.layer.global_count > 1;
    f.divides = s.layer.global_divides != 0;
    f.type = Q4_F32;
    alignas(64) float sums[kTileRows];
    for (int64_t t = columns.from / kTileRows; t * kTileRows < columns.to; ++t) {
        const int64_t before = t * kTileRows;
        s.kernel({m, at, s.layer.tiles + t * at.tile_bytes}, spikes, count, sums);
        f.global = s.layer.global_scale && f.is_global_per_row ? s.layer.global_scale + before : s.layer.global_scale;
        f.bias = step.input_count == 3 ? row<const float>(step.inputs[2], 0) + before : nullptr;
        f.count = std::min<int64_t>(kTileRows, m.rows - before);
        f.y = row<float>(step.outputs[0], r) + before;
        kernels_.finish(f, sums, 1);
    }
}

void q4_program::spike(const q4::Bound& b, const q4_step& s, int me, int team, int64_t round) {
    using namespace q4;
    const q4_view &x = s.inputs[0], &y = s.outputs[0];
    const int64_t now = s.op == Q4_INTEGRATE ? 0 : *b.indices + (b.ticks ? round : 0);
    // By the neurons that are read or written, whatever holds them.
    const bool is_by_x = s.op == Q4_INTEGRATE || s.op == Q4_FIRE || s.op == Q4_STORE_ROW || s.op == Q4_PACK;
    const Range columns = part_of_columns(is_by_x ? x.columns : y.columns, me, team);
    const int64_t from = columns.from, width = columns.to - from;
    if (width <= 0) return;
    const int64_t rows = s.op == Q4_SEND ? static_cast<int64_t>(s.numbers[1]) : is_by_x ? x.rows : y.rows;
    const int64_t lag = s.number_count && s.op != Q4_FIRE ? static_cast<int64_t>(s.numbers[0]) : 0;
    const auto read = [&] { return slot_of(x.rows, rows, now, lag); };
    const auto write = [&](const q4_view& v) { return slot_of(v.rows, rows, now); };
    for (int64_t r = 0; r < rows; ++r) {
        switch (s.op) {
        case Q4_INTEGRATE: {
            const Vector none{nullptr, true};
            do_.integrate(row<float>(x, r) + from, row<const float>(s.inputs[1], r) + from, vector_of(s.inputs[2]).from(from),
                          s.input_count > 3 ? vector_of(s.inputs[3]).from(from) : none,
                          s.input_count > 4 ? vector_of(s.inputs[4]).from(from) : none, width);
            break;
        }
        case Q4_FIRE: {
            auto* bits = row<uint64_t>(y, write(y) + r);
            Firing f{};
            f.reset = static_cast<int32_t>(s.numbers[0]), f.is_inclusive = s.numbers[1] == 1.0;
            for (int64_t c = from; c < columns.to; c += 64) {
                f.mem = row<float>(x, r) + c;
                f.threshold = vector_of(s.inputs[1], r).from(c), f.vector = vector_of(s.inputs[2]).from(c);
                if (s.input_count == 7) {
                    f.count = row<float>(s.inputs[4], r) + c, f.before = row<const float>(s.inputs[5], r) + c;
                    f.steps = vector_of(s.inputs[6]).from(c);
                }
                f.columns = std::min<int64_t>(64, columns.to - c);
                bits[c / 64] = do_.fire(f);
            }
            break;
        }
        case Q4_SPIKES: multiply_spikes(b, s, row<const uint64_t>(x, read() + r), columns, me, r); break;
        case Q4_SEND: {
            const Sender& sender = *b.sender;
            int64_t slots[256];
            const int64_t count = y.rows / rows;
            for (int64_t delay = 0; delay < std::min<int64_t>(count, 256); ++delay)
                slots[delay] = slot_of(y.rows, rows, now, lag - delay) * y.stride;
            const Sending to{sender.synapses, row<float>(y, r), slots};
            each_bit(row<const uint64_t>(x, read() + r), sender.synapses.sources, [&](int64_t source) {
                const int64_t* cuts = &sender.cuts[static_cast<size_t>(source * (sender.team + 1)) + static_cast<size_t>(me)];
                if (cuts[0] < cuts[1]) do_.send(to, cuts[0], cuts[1], sender.targets[static_cast<size_t>(source * sender.team + me)]);
            });
            break;
        }
        case Q4_TAKE: {
            auto* slot = row<float>(x, read() + r) + from;
            std::memcpy(row<float>(y, r) + from, slot, static_cast<size_t>(width) * 4);
            std::memset(slot, 0, static_cast<size_t>(width) * 4);
            break;
        }
        case Q4_ROW: std::memcpy(row<float>(y, r) + from, row<const float>(x, read() + r) + from, static_cast<size_t>(width) * 4); break;
        case Q4_STORE_ROW: std::memcpy(row<float>(y, write(y) + r) + from, row<const float>(x, r) + from, static_cast<size_t>(width) * 4); break;
        case Q4_PACK: {
            auto *ones = row<uint64_t>(y, write(y) + r), *odd = row<uint64_t>(s.outputs[1], write(s.outputs[1]) + r);
            const auto* in = row<const float>(x, r);
            for (int64_t c = from; c < columns.to; c += 64) {
                uint64_t one = 0, other = 0;
                pack(in + c, std::min<int64_t>(64, columns.to - c), &one, &other);
                ones[c / 64] = one, odd[c / 64] = other;
            }
            break;
        }
        default: {
            const auto* words = row<const uint64_t>(x, read() + r);
            auto* out = row<float>(y, r);
            for (int64_t c = from; c < columns.to; c += 8) {
                const auto byte = static_cast<uint8_t>(words[c / 64] >> c % 64);
                std::memcpy(out + c, kFloats.of[byte], static_cast<size_t>(std::min<int64_t>(8, columns.to - c)) * 4);
            }
        }
        }
    }
}
