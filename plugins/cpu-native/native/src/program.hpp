// A program: bound once, with all the memory that runs need (program_bind.cpp), and run by one team of threads that wait for
// each other only where a step needs what another thread wrote (program.cpp).
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "barrier.hpp"
#include "product.hpp"
#include "program_checks.hpp"

namespace q4 {

// A packed product of a step.
struct Linear {
    q4_layer layer;
    Layout at;
    q4_call call, exact;
    int64_t batch;                   // rows of x at once
    std::vector<Pass> passes, last;  // of a whole batch, and of what remains after whole ones
    Pass one;                        // a row that the family can't hold
    int64_t outlier_rows = 0;        // of the last run
    bool has_layout = false;         // the step before has laid the same rows out in the same way
    const bool is_shared;            // the rows as laid out; one row is laid out by each thread for itself

    Linear(const q4_step& s, const Kernels& kernels, int threads)
        : layer(*s.layer), at(layer.matrix), call(call_of(s)), exact(call), is_shared(call.x_rows > 1) {
        exact.family = Q4_EXACT;
        batch = std::min(call.x_rows, batch_rows(at, kernels.panel_rows[call.family], threads));
        plan(kernels, batch, passes);
        if (call.x_rows % batch) plan(kernels, call.x_rows % batch, last);
        one = {0, 1, kernels.direct(layer.matrix, Q4_EXACT, 1), nullptr};
    }
    bool has_panels(const Kernels& kernels, int64_t count) const { return count >= kernels.panel_from[call.family]; }
    // Let a run be of the first rows of x; takes no memory, of which the most have taken enough.
    void resize(const Kernels& kernels, int64_t rows) {
        call.x_rows = exact.x_rows = rows;
        last.clear();
        if (rows % batch) plan(kernels, rows % batch, last);
    }
    // The most passes that some rows take.
    void reserve(const Kernels& kernels) {
        size_t most = 0;
        for (int64_t rows = 1; rows < batch; ++rows) {
            last.clear();
            plan(kernels, rows, last);
            most = std::max(most, last.size());
        }
        last.reserve(most);
        resize(kernels, call.x_rows);
    }

    // Whether rows that another product laid out are laid out for this one as well.
    bool takes_layout_of(const Linear& other) const {
        q4_matrix mine = layer.matrix, theirs = other.layer.matrix;
        mine.rows = theirs.rows = 1;
        return call.x == other.call.x && call.x_rows == other.call.x_rows && call.x_stride == other.call.x_stride &&
               call.inputs.order == other.call.inputs.order && call.inputs.factor == other.call.inputs.factor &&
               call.family == other.call.family && std::memcmp(&mine, &theirs, sizeof mine) == 0 &&
               batch == call.x_rows && other.batch == call.x_rows;
    }

  private:
    void plan(const Kernels& kernels, int64_t count, std::vector<Pass>& to) const {
        each_pass(layer.matrix, call.family, kernels, count, has_panels(kernels, count), [&](const Pass& pass) { to.push_back(pass); });
    }
};

struct Range {
    int64_t from, to;
};
inline Range part_of(int64_t count, int me, int team) { return {count * me / team, count * (me + 1) / team}; }

struct Access;  // what a step reads or writes

// What a step of SPIKES or SEND needs besides its views.
struct Sender {
    q4_layer layer{};
    std::vector<Place> places;  // of each column of the layer's tiles
    SpikeKernel kernel = nullptr;
    q4_synapses synapses{};
    // Of each source, where the entries of each thread begin, and where the last ones end; and the target before them.
    std::vector<int64_t> cuts;
    std::vector<int32_t> targets;
    int team = 0;  // that the cuts are for
};

constexpr int64_t kMostStreams = 4096;

// A view of a step that lies in a stream.
struct Moving {
    bool is_input;
    int view, stream;
    int64_t offset;    // bytes from the stream's first
    int64_t step = 0;  // of this run

    q4_view& of(q4_step& s) const { return is_input ? s.inputs[view] : s.outputs[view]; }
};

struct Bound {
    q4_step step;
    Split split;
    std::unique_ptr<Linear> linear;
    std::unique_ptr<Sender> sender;
    bool ticks = false;  // its clock is the program's
    int64_t* indices = nullptr;
    int64_t range = 0;      // of the indices
    bool has_columns = false;  // is divided by columns
    bool waits = false;     // for all others, before it begins
    std::vector<Moving> moving;
    bool moves = false;  // from round to round, in this run
};

// Memory of one thread.
struct Thread {
    uint8_t *rows, *exact;  // one row of x
    Panel* panel;
    float* sums;
    Attention::Scratch attention;
    float* states;  // of as many queries as are taken together
    Spike* spikes;
    uint8_t odd = 0, exact_odd = 0;
};

}  // namespace q4

struct q4_program {
    q4_program(const q4_step* steps, int64_t count, int threads, int64_t* clock, const q4_stream* streams, int64_t stream_count,
               const q4::Kernels& kernels);
    int32_t run(int threads, int64_t rounds, const q4_stream* streams, const q4_turns* turns);
    bool take_tokens(const int64_t* tokens, int64_t most);
    int64_t outlier_rows(int64_t step) const;

  private:
    void assign_splits();
    void link();
    std::vector<q4::Access> accesses(const q4::Bound& b, int64_t round) const;
    void take_memory();
    int32_t read_indices();
    bool take_streams(const q4_stream* streams);
    void cut(q4::Sender& s, int64_t targets, int team);
    void share(int threads, int64_t first, int64_t last);
    bool take_turn(int me, int team, int64_t round);
    void work(int me, int team, int64_t first, int64_t last);
    void perform(const q4::Bound& b, int me, int team, int64_t round);
    void spike(const q4::Bound& b, const q4_step& s, int me, int team, int64_t round);
    void multiply_spikes(const q4::Bound& b, const q4_step& s, const uint64_t* bits, q4::Range columns, int me, int64_t row);
    q4::Range part_of_columns(int64_t columns, int me, int team) const;
    void linear(q4::Linear& l, int me, int team);
    void attend(const q4::Bound& b, const q4_step& s, int me, int team);
    void attend_token(const q4::Bound& b, const q4_step& s, q4::Attention& a, int64_t first, int64_t end, int me, int team);
    q4::Attention attention_of(const q4_step& s, int64_t columns, int me);
    template <class Query> void attend_rows(q4::Attention& a, int64_t from, int64_t to, int me, const Query& query);
    void attend_spans(const q4::Bound& b, const q4_step& s, int me, int team);
    void mean_spans(const q4::Bound& b, const q4_step& s, q4::Range columns);
    void resize(int64_t tokens);

    const q4::Kernels& kernels_;
    const q4::Operations& do_;
    int threads_;
    int64_t* clock_;
    const int64_t* tokens_ = nullptr;  // of a run
    int64_t most_tokens_ = 0, sized_ = 0;
    struct Size {
        int64_t *value, each;  // of a token
    };
    std::vector<Size> sizes_;
    int64_t unit_ = 16;     // columns that one thread has at least: a tile, and a cache line of float32; a word of bits
    bool is_shared_ = false;  // any step is done by more than one thread
    std::vector<q4::Bound> bound_;
    std::vector<int> elements_;  // bytes of a number in each stream: what its address and its step are multiples of
    std::vector<int64_t> indices_, numbers_;  // tokens and positions as they were at the start; 0, 1, 2 …
    std::vector<q4::Line> memory_;
    std::vector<q4::Panel> panels_;
    std::vector<q4::Thread> threads_memory_;
    uint8_t *rows_ = nullptr, *odd_ = nullptr;  // of products of several rows
    float* states_ = nullptr;                   // of attention: of each query of a token, of each block of its keys
    q4::Barrier barrier_;
    const q4_turns* turns_ = nullptr;  // of a run
    int64_t rounds_ = 0, done_ = 0;    // of a run, and of them
    bool is_over_ = false;             // before its last round
    std::atomic<int32_t> runner_{0};  // 1 + the forks of the process that runs it: a child has its parent's copy
};
