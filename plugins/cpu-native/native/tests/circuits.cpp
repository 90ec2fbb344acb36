// `spiking`: random circuits of spiking neurons, whose every number is that of loops which say what the operations mean: sums in
// their order, products and sums rounded one by one. States and records are bound, or given by each run.
#include <cstdio>
#include <cstring>

#include "commands.hpp"
#include "memory.hpp"
#include "numbers.hpp"
#include "random.hpp"

namespace q4test {
namespace {

// Rows with gaps, and what they have to hold.
template <class T> struct Rows {
    q4_view view{};
    std::vector<T> wanted, initial;

    Rows() = default;
    Rows(Memory& memory, Random& r, int64_t rows, int64_t columns, bool has_gaps = true)
        : wanted(static_cast<size_t>(rows * columns)), initial(wanted.size()) {
        const int64_t stride = columns + (has_gaps ? r.between(0, 3) : 0);
        view = {memory.take(((rows - 1) * stride + columns) * static_cast<int64_t>(sizeof(T)), 8), rows, columns, stride};
    }
    void start(const std::vector<T>& values) { wanted = initial = values; }
    void restore() {
        for (int64_t i = 0; i < view.rows; ++i)
            std::memcpy(static_cast<T*>(view.data) + i * view.stride, &initial[static_cast<size_t>(i * view.columns)], static_cast<size_t>(view.columns) * sizeof(T));
    }
    bool is_right() const {
        for (int64_t i = 0; i < view.rows; ++i)
            if (std::memcmp(static_cast<const T*>(view.data) + i * view.stride, &wanted[static_cast<size_t>(i * view.columns)], static_cast<size_t>(view.columns) * sizeof(T)) != 0)
                return false;
        return true;
    }
    T* row(int64_t i) { return &wanted[static_cast<size_t>(i * view.columns)]; }
};

struct Synapses {
    std::vector<int64_t> starts{0};
    std::vector<int32_t> first;
    std::vector<uint8_t> gaps, wide_gaps, delays, codes;
    std::vector<uint16_t> levels;
    q4_synapses view{};

    Synapses(Random& r, int64_t sources, int64_t targets, int64_t longest) {
        std::vector<uint16_t> far;
        for (int64_t source = 0; source < sources; ++source) {
            int64_t target = r.between(0, targets - 1);
            first.push_back(static_cast<int32_t>(target));
            for (int64_t left = r.chance(0.2) ? 0 : r.between(0, 40), gap = 0; left > 0 && target < targets; --left) {
                far.push_back(static_cast<uint16_t>(gap));
                delays.push_back(static_cast<uint8_t>(r.chance(0.1) ? 0 : r.between(1, longest)));
                gap = r.between(0, std::max<int64_t>(1, targets / 20));
                target += gap;
            }
            starts.push_back(static_cast<int64_t>(far.size()));
        }
        const size_t entries = std::max<size_t>(1, (far.size() + 31) / 32) * 32;
        far.resize(entries), delays.resize(entries);
        for (const uint16_t gap : far) gaps.push_back(static_cast<uint8_t>(gap));
        wide_gaps.resize(2 * entries);
        std::memcpy(wide_gaps.data(), far.data(), 2 * entries);
        for (size_t i = 0; i < entries / 2; ++i) codes.push_back(static_cast<uint8_t>(r.between(0, 255)));
        for (size_t i = 0; i < entries / 16; ++i) {
            uint16_t half = 0;
            encode(Q4_F16, round_to(Q4_F16, 0.3 * r.bell()), &half);
            levels.push_back(half);
        }
        const bool is_wide = targets / 20 > 255 || r.chance(0.3);
        view = {sources, targets, static_cast<int64_t>(entries), starts.data(), first.data(), is_wide ? wide_gaps.data() : gaps.data(),
                is_wide ? 2 : 1, delays.data(), codes.data(), levels.data()};
    }

    // Add what a source sends: use(target, weight, delay), in order.
    template <class Use> void each(int64_t source, const Use& use) const {
        int64_t target = first[static_cast<size_t>(source)];
        for (int64_t e = starts[static_cast<size_t>(source)]; e < starts[static_cast<size_t>(source) + 1]; ++e) {
            uint16_t gap;
            std::memcpy(&gap, &wide_gaps[static_cast<size_t>(2 * e)], 2);
            target += gap;
            const int code = codes[static_cast<size_t>(e / 2)] >> (e % 2 * 4) & 15;
            const auto scale = static_cast<float>(decode(Q4_F16, &levels[static_cast<size_t>(e / 32 * 2)]));
            const auto offset = static_cast<float>(decode(Q4_F16, &levels[static_cast<size_t>(e / 32 * 2 + 1)]));
            const float product = scale * static_cast<float>(code);
            if (delays[static_cast<size_t>(e)]) use(target, product + offset, delays[static_cast<size_t>(e)]);
        }
    }
};

class Circuit {
  public:
    Circuit(uint64_t seed, Memory& memory)
        : r_(seed), rows_(r_.between(1, 3)), cells_(r_.chance(0.1) ? r_.between(300, 900) : r_.between(1, 200)), inputs_(r_.between(1, 150)),
          rounds_(r_.between(1, 24)), longest_(r_.between(1, 6)), lag_(r_.between(0, 2)), sent_lag_(r_.between(0, 2)), is_given_(r_.chance(0.6)),
          first_(r_.chance(0.3) ? (int64_t{1} << 40) + r_.between(0, 99) : r_.between(0, 99)), feed_(r_, inputs_, cells_, longest_),
          back_(r_, cells_, cells_, longest_), memory_(memory) {
        make();
        simulate();
    }

    std::string check(int32_t isa, int threads, bool is_split) {
        restore();
        std::vector<q4_stream> streams;
        for (const Given& g : given_) streams.push_back({g.at.data, g.bytes, 0});
        q4_program* program = nullptr;
        int32_t status = q4_cpu_program_make(steps_.data(), static_cast<int64_t>(steps_.size()), threads, isa, &clock_, streams.data(),
                                             static_cast<int64_t>(streams.size()), &program);
        if (status != 0) return "q4_cpu_program_make returned " + std::to_string(status);
        for (int64_t done = 0; done < rounds_ && status == 0;) {
            Ending ending{clock_, r_.between(1, 5), 0, false};
            const q4_turns turns{Ending::turn, &ending};
            for (size_t i = 0; i < given_.size(); ++i) {
                const Given& g = given_[i];
                streams[i] = {g.data + (g.is_round ? done * g.step : 0), 0, g.is_round ? g.step : 0};
            }
            status = q4_cpu_program_run(program, threads, rounds_ - done, streams.data(), is_split ? &turns : nullptr);
            const int64_t count = is_split ? std::min(rounds_ - done, ending.after) : rounds_;
            if (is_split && (ending.is_wrong || ending.called != count + 1)) return "turns were called wrongly";
            done += count;
        }
        q4_cpu_program_free(program);
        if (status != 0) return "q4_cpu_program_run returned " + std::to_string(status);
        if (clock_ != first_ + rounds_) return "the clock is wrong";
        const bool are_right[] = {mem_.is_right(), count_.is_right(), ring_.is_right(), fired_.is_right(), sent_.is_right(),
                                  odd_.is_right(), record_.is_right(), trace_.is_right(), past_.is_right()};
        const char* const names[] = {"membranes", "counts", "what is on its way", "spikes", "bits of inputs", "odd inputs", "the record", "the trace",
                                     "the past"};
        for (size_t i = 0; i < std::size(are_right); ++i)
            if (!are_right[i]) return std::string("other bits in ") + names[i];
        return memory_.is_untouched() ? std::string{} : "bytes around a buffer were written";
    }

  private:
    // Turns that end a run after some rounds; the clock does not move meanwhile.
    struct Ending {
        const int64_t& clock;
        int64_t after, called;
        bool is_wrong;
        int64_t first = clock;

        static int32_t turn(void* self, int64_t round, int64_t rounds) {
            Ending& e = *static_cast<Ending*>(self);
            e.is_wrong = e.is_wrong || round != e.called++ || round > rounds || e.clock != e.first;
            return round == e.after;
        }
    };
    struct Given {
        q4_view at;      // as the program was made with
        int64_t bytes;   // of a round
        uint8_t* data;
        int64_t step;
        bool is_round;
    };

    std::vector<float> random(int64_t count, double size = 1.0) {
        std::vector<float> found(static_cast<size_t>(count));
        for (float& value : found) value = static_cast<float>(size * r_.bell());
        return found;
    }
    Rows<float> vector(double value) {
        Rows<float> made(memory_, r_, 1, r_.chance(0.5) ? 1 : cells_);
        std::vector<float> numbers;
        for (int64_t i = 0; i < made.view.columns; ++i) numbers.push_back(static_cast<float>(value * (0.9 + 0.2 * r_.uniform())));
        made.start(numbers), made.restore();
        return made;
    }
    static float at(const Rows<float>& v, int64_t i) { return v.wanted[v.view.columns == 1 ? 0 : static_cast<size_t>(i)]; }

    // The view of a state, which each run may give.
    template <class T> q4_view state(const Rows<T>& rows) {
        const q4_view v = rows.view;
        if (!is_given_) return v;
        const int64_t bytes = ((v.rows - 1) * v.stride + v.columns) * static_cast<int64_t>(sizeof(T));
        return give(v, bytes, static_cast<uint8_t*>(v.data), 0, false, sizeof(T));
    }
    // The view of a round's rows, of which `all` has those of all rounds.
    template <class T> q4_view round(const Rows<T>& all) {
        const q4_view v = all.view;
        const auto size = static_cast<int64_t>(sizeof(T));
        return give({nullptr, rows_, v.columns, v.stride}, ((rows_ - 1) * v.stride + v.columns) * size, static_cast<uint8_t*>(v.data),
                    rows_ * v.stride * size, true, sizeof(T));
    }
    q4_view give(q4_view v, int64_t bytes, uint8_t* data, int64_t step, bool is_round, size_t element) {
        v.data = memory_.take(bytes, static_cast<int64_t>(element));  // stands for it: never touched
        given_.push_back({v, bytes, data, step, is_round});
        return v;
    }

    q4_step& add(int32_t op, std::initializer_list<q4_view> inputs, std::initializer_list<q4_view> outputs, std::initializer_list<double> numbers = {}) {
        q4_step s{};
        s.op = op;
        for (const q4_view& v : inputs) s.inputs[s.input_count++] = v;
        for (const q4_view& v : outputs) s.outputs[s.output_count++] = v;
        for (const double number : numbers) s.numbers[s.number_count++] = number;
        steps_.push_back(s);
        return steps_.back();
    }

    void make() {
        const int64_t words = (cells_ + 63) / 64, input_words = (inputs_ + 63) / 64;
        x_ = Rows<float>(memory_, r_, rounds_ * rows_, inputs_);
        std::vector<float> drawn(x_.wanted.size());
        for (float& value : drawn) value = r_.chance(0.2) ? r_.of<float>({1.0f, 1.0f, 1.0f, 0.5f, -0.0f, NAN}) : 0.0f;
        x_.start(drawn);
        sent_ = Rows<uint64_t>(memory_, r_, (sent_lag_ + r_.between(1, 3)) * rows_, input_words);
        odd_ = Rows<uint64_t>(memory_, r_, rounds_ * rows_, input_words);
        ring_ = Rows<float>(memory_, r_, (longest_ + r_.between(1, 4)) * rows_, cells_);
        ring_.start(random(ring_.view.rows * cells_, 0.2));
        mem_ = Rows<float>(memory_, r_, rows_, cells_), mem_.start(random(rows_ * cells_));
        count_ = Rows<float>(memory_, r_, rows_, cells_);
        fired_ = Rows<uint64_t>(memory_, r_, (lag_ + r_.between(1, 3)) * rows_, words);
        record_ = Rows<float>(memory_, r_, rounds_ * rows_, cells_);
        trace_ = Rows<float>(memory_, r_, r_.between(1, 4) * rows_, cells_);
        past_ = Rows<float>(memory_, r_, rows_, cells_);
        beta_ = vector(0.9), gain_ = vector(1.1), leak_ = vector(0.05), threshold_ = vector(0.7), amount_ = vector(0.4), wait_ = vector(0);
        for (float& value : wait_.initial) value = static_cast<float>(r_.between(0, 3));
        wait_.start(wait_.initial), wait_.restore();
        reset_ = static_cast<int>(r_.between(0, 2)), is_inclusive_ = r_.chance(0.5), waits_ = r_.chance(0.5);
        parts_ = static_cast<int>(r_.between(3, 5)), past_lag_ = r_.between(0, trace_.view.rows / rows_ - 1);
        const q4_view clock{&clock_, 1, 1, 1};
        Rows<float> arrived(memory_, r_, rows_, cells_), before(memory_, r_, rows_, cells_), ones(memory_, r_, rows_, cells_);
        const q4_view mem = state(mem_), ring = state(ring_), count = state(count_);
        q4_view x = x_.view, odd = odd_.view, record = record_.view;
        Rows<float> read(memory_, r_, rows_, inputs_);
        if (is_given_) {
            x = round(x_), odd = round(odd_), record = round(record_);
            add(Q4_PACK, {x, clock}, {sent_.view, odd});
        } else {
            add(Q4_ROW, {x, clock}, {read.view}, {0});
            add(Q4_PACK, {read.view, clock}, {sent_.view, odd});
        }
        const auto rows = static_cast<double>(rows_);
        add(Q4_SEND, {sent_.view, clock, ring}, {ring}, {static_cast<double>(sent_lag_), rows}).synapses = &feed_.view;
        add(Q4_TAKE, {ring, clock}, {arrived.view, ring});
        if (waits_) add(Q4_COPY, {mem}, {before.view});
        q4_step& integrate = add(Q4_INTEGRATE, {mem, arrived.view, beta_.view, gain_.view, leak_.view}, {mem});
        integrate.input_count = parts_;
        q4_step& fire = add(Q4_FIRE, {mem, threshold_.view, amount_.view, clock, count, before.view, wait_.view}, {fired_.view, mem, count},
                            {static_cast<double>(reset_), static_cast<double>(is_inclusive_)});
        if (!waits_) fire.input_count = 4, fire.output_count = 2;
        add(Q4_SEND, {fired_.view, clock, ring}, {ring}, {static_cast<double>(lag_), rows}).synapses = &back_.view;
        if (is_given_) {
            add(Q4_UNPACK, {fired_.view, clock}, {record}, {static_cast<double>(lag_)});
        } else {
            add(Q4_UNPACK, {fired_.view, clock}, {ones.view}, {static_cast<double>(lag_)});
            add(Q4_STORE_ROW, {ones.view, clock}, {record});
        }
        add(Q4_STORE_ROW, {mem, clock}, {trace_.view});
        add(Q4_ROW, {trace_.view, clock}, {past_.view}, {static_cast<double>(past_lag_)});
    }

    template <class T> T* slot(Rows<T>& ring, int64_t round, int64_t row) {
        const int64_t slots = ring.view.rows / rows_;
        return ring.row(((round % slots + slots) % slots) * rows_ + row);
    }
    void send(const Synapses& synapses, Rows<uint64_t>& bits, int64_t round, int64_t lag) {
        for (int64_t row = 0; row < rows_; ++row)
            for (int64_t source = 0; source < synapses.view.sources; ++source)
                if (slot(bits, round - lag, row)[source / 64] >> source % 64 & 1)
                    synapses.each(source, [&](int64_t target, float weight, int64_t delay) { slot(ring_, round - lag + delay, row)[target] += weight; });
    }

    void simulate() {
        for (int64_t n = 0; n < rounds_; ++n) {
            const int64_t round = first_ + n;
            // Without streams, inputs and records are rings of as many slots as there are rounds.
            const int64_t place = is_given_ ? n : round % rounds_;
            for (int64_t row = 0; row < rows_; ++row) {
                uint64_t *ones = slot(sent_, round, row), *odd = odd_.row(place * rows_ + row);
                std::fill_n(ones, sent_.view.columns, 0), std::fill_n(odd, odd_.view.columns, 0);
                for (int64_t i = 0; i < inputs_; ++i) {
                    const float value = x_.row(place * rows_ + row)[i];
                    ones[i / 64] |= static_cast<uint64_t>(value != 0.0f) << i % 64;
                    odd[i / 64] |= static_cast<uint64_t>(value != 0.0f && value != 1.0f) << i % 64;
                }
            }
            send(feed_, sent_, round, sent_lag_);
            for (int64_t row = 0; row < rows_; ++row) {
                float *arrived = slot(ring_, round, row), *mem = mem_.row(row), *count = count_.row(row);
                uint64_t* bits = slot(fired_, round, row);
                std::fill_n(bits, fired_.view.columns, 0);
                for (int64_t i = 0; i < cells_; ++i) {
                    const float before = mem[i], current = parts_ > 3 ? at(gain_, i) * arrived[i] : arrived[i];
                    const float left = at(beta_, i) * before;
                    float value = left + current;
                    if (parts_ > 4) value += at(leak_, i);
                    arrived[i] = 0.0f;
                    const bool is_held = waits_ && count[i] > 0.0f;
                    if (is_held) value = before;
                    const bool fires = !is_held && (is_inclusive_ ? value >= at(threshold_, i) : value > at(threshold_, i));
                    if (waits_) count[i] = fires ? at(wait_, i) : count[i] > 1.0f ? count[i] - 1.0f : 0.0f;
                    if (reset_ == 1) value -= at(amount_, i) * (fires ? 1.0f : 0.0f);
                    if (reset_ == 2 && fires) value = at(amount_, i);
                    mem[i] = value;
                    bits[i / 64] |= static_cast<uint64_t>(fires) << i % 64;
                }
            }
            send(back_, fired_, round, lag_);
            for (int64_t row = 0; row < rows_; ++row) {
                for (int64_t i = 0; i < cells_; ++i)
                    record_.row(place * rows_ + row)[i] = static_cast<float>(slot(fired_, round - lag_, row)[i / 64] >> i % 64 & 1);
                std::copy_n(mem_.row(row), cells_, slot(trace_, round, row));
            }
            for (int64_t row = 0; row < rows_; ++row) std::copy_n(slot(trace_, round - past_lag_, row), cells_, past_.row(row));
        }
    }

    void restore() {
        clock_ = first_;
        x_.restore(), mem_.restore(), count_.restore(), ring_.restore(), fired_.restore(), sent_.restore(), odd_.restore();
        record_.restore(), trace_.restore(), past_.restore();
    }

    Random r_;
    int64_t rows_, cells_, inputs_, rounds_, longest_, lag_, sent_lag_;
    bool is_given_;
    int64_t first_, clock_ = 0, past_lag_ = 0;
    Synapses feed_, back_;
    Memory& memory_;
    int reset_ = 0, parts_ = 3;
    bool is_inclusive_ = false, waits_ = false;
    Rows<float> x_, ring_, mem_, count_, record_, trace_, past_, beta_, gain_, leak_, threshold_, amount_, wait_;
    Rows<uint64_t> sent_, odd_, fired_;
    std::vector<Given> given_;
    std::vector<q4_step> steps_;
};

}  // namespace

int circuits(const Arguments& a, bool is_guarded) {
    const char* command = is_guarded ? "spiking-guard" : "spiking";
    Memory memory(is_guarded);
    int failures = 0;
    for (int64_t i = 0; i < a.count && failures < 10; ++i) {
        const uint64_t seed = a.seed + static_cast<uint64_t>(i);
        memory.clear();
        Circuit circuit(seed, memory);
        const Isa& isa = a.isas[static_cast<size_t>(i) % a.isas.size()];
        std::string wrong;
        for (const int threads : {1, 2, 5})
            if (wrong.empty()) wrong = circuit.check(isa.number, threads, threads == 2);
        if (wrong.empty()) continue;
        ++failures;
        std::printf("%s 1 %llu %s: %s\n", command, static_cast<unsigned long long>(seed), isa.name, wrong.c_str());
    }
    if (!failures) std::printf("%s: %lld circuits passed\n", command, static_cast<long long>(a.count));
    return failures ? 1 : 0;
}

}  // namespace q4test
