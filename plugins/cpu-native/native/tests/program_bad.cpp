// `program-bad`: steps that make no sense are refused by their number, and so are tokens and positions that are out of range,
// before anything is written; a program runs once at a time; a run takes no memory.
#include <atomic>
#include <cstdio>
#include <functional>
#include <limits>

#include "commands.hpp"
#include "load.hpp"
#include "programs.hpp"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Every allocation of the process passes here, the OpenMP runtime's too.
#define Q4_COUNTS_MEMORY
namespace {
std::atomic<int64_t> t_taken{0};
}
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t bytes) noexcept { return ++t_taken, __libc_malloc(bytes); }
void* calloc(size_t count, size_t bytes) noexcept { return ++t_taken, __libc_calloc(count, bytes); }
void* realloc(void* memory, size_t bytes) noexcept { return ++t_taken, __libc_realloc(memory, bytes); }
void* aligned_alloc(size_t align, size_t bytes) noexcept { return ++t_taken, __libc_memalign(align, bytes); }
}
#endif

namespace q4test {
namespace {

constexpr int64_t kWidth = 48, kHeads = 3, kColumns = 16, kCapacity = 5;

// A sound step of each operation, each part of which can be spoilt.
struct Everything {
    std::vector<float> x, y, weight, bias, matrix, table, keys, values;
    std::vector<int64_t> index{2, 0, 0}, columns;
    Load load;
    q4_layer layer;
    q4_step step{};

    Everything(int32_t op, int32_t isa)
        : x(kWidth, 0.5f), y(kWidth * kCapacity, -7.0f), weight(kWidth, 1.0f), bias(kWidth, 1.0f), matrix(kWidth * kWidth, 0.1f),
          table(kCapacity * kColumns, 0.5f), keys(kWidth * kCapacity, 0.1f), values(kWidth * kCapacity, 0.2f), columns(kWidth, -7),
          load(1, Q4_A8, isa, kWidth, 64, 1) {
        load.packs(1);
        layer = load.layer();
        step.op = op, step.input_count = step.output_count = 1;
        const q4_view row{x.data(), 1, kWidth, kWidth}, heads{x.data(), kHeads, kColumns, kColumns}, place{index.data(), 1, 1, 1};
        const q4_view cache{keys.data(), kHeads * kCapacity, kColumns, kColumns};
        step.inputs[0] = row, step.outputs[0] = {y.data(), 1, kWidth, kWidth};
        const auto with = [&](const q4_view& v) { step.inputs[step.input_count++] = v; };
        const auto number = [&](double value) { step.numbers[step.number_count++] = value; };
        const q4_view heads_out{y.data(), kHeads, kColumns, kColumns}, beside{weight.data(), 1, kWidth, kWidth};
        switch (op) {
        case Q4_EMBEDDING:
            step.inputs[0] = place, with({matrix.data(), kCapacity, kWidth, kWidth});
            break;
        case Q4_LINEAR: with({matrix.data(), kWidth, kWidth, kWidth}), with({bias.data(), 1, kWidth, kWidth}), number(1); break;
        case Q4_RMS_NORM: with(beside), number(1e-5), number(0); break;
        case Q4_LAYER_NORM: with(beside), with({bias.data(), 1, kWidth, kWidth}), number(1e-5); break;
        case Q4_ROTARY:
            step.inputs[0] = heads, with({table.data(), kCapacity, kColumns, kColumns}), with(place), number(0);
            step.outputs[0] = heads_out;
            break;
        case Q4_STORE: step.inputs[0] = heads, with(place), step.outputs[0] = {y.data(), kHeads * kCapacity, kColumns, kColumns}; break;
        case Q4_ATTENTION:
            step.inputs[0] = heads, with(cache), with({values.data(), kHeads * kCapacity, kColumns, kColumns}), with(place);
            number(kHeads), number(0.1), number(0), step.outputs[0] = heads_out;
            break;
        case Q4_ATTEND_SPANS:
            index = {2, 4, 0}, with({keys.data(), kCapacity, kWidth, kWidth}), with({values.data(), kCapacity, kWidth, kWidth});
            with({index.data(), 1, 2, 2}), number(kHeads), number(kHeads), number(0.1);
            break;
        case Q4_MEAN_SPANS:
            index = {2, 4, 0}, step.inputs[0] = {keys.data(), kCapacity, kWidth, kWidth}, with({index.data(), 1, 2, 2});
            break;
        case Q4_ADD:
        case Q4_MULTIPLY: with(beside); break;
        case Q4_AFFINE: number(2), number(1); break;
        case Q4_ARGMAX: step.outputs[0] = {columns.data(), 1, 1, 1}; break;
        case Q4_TOP_K:
            number(4), step.output_count = 2, step.outputs[0] = {y.data(), 1, 4, 4}, step.outputs[1] = {columns.data(), 1, 4, 4};
            break;
        default: break;
        }
    }
    int index_input() const {
        if (step.op == Q4_ATTENTION || step.op == Q4_ATTEND_SPANS) return 3;
        return step.op == Q4_EMBEDDING ? 0 : step.op == Q4_ROTARY ? 2 : step.op == Q4_STORE || step.op == Q4_MEAN_SPANS ? 1 : -1;
    }
    // A packed product or embedding in place of a dense one.
    void pack() {
        step.layer = &layer;
        if (step.op == Q4_EMBEDDING) {
            step.input_count = 1, step.outputs[0] = {y.data(), 1, 64, 64};
        } else {
            step.inputs[0] = {y.data(), 1, 64, 64}, step.inputs[1] = step.inputs[2], step.input_count = 2;
            step.outputs[0] = {x.data(), 1, kWidth, kWidth};
        }
    }
};

constexpr int32_t kAny = -1;
struct Spoilt {
    const char* what;
    int32_t op;  // whose step is spoilt; kAny: of every operation
    std::function<void(Everything&)> spoil;
};

const Spoilt kSpoilt[] = {
    {"no input", kAny, [](Everything& e) { e.step.inputs[0].data = nullptr; }},
    {"no output", kAny, [](Everything& e) { e.step.outputs[0].data = nullptr; }},
    {"no rows", kAny, [](Everything& e) { e.step.inputs[0].rows = 0; }},
    {"negative columns", kAny, [](Everything& e) { e.step.outputs[0].columns = -1; }},
    {"more columns than memory", kAny, [](Everything& e) { e.step.inputs[0].columns = int64_t{1} << 60; }},
    {"rows that overlap", kAny, [](Everything& e) { e.step.inputs[0].stride = e.step.inputs[0].columns - 1; }},
    {"a huge stride", kAny, [](Everything& e) { e.step.outputs[0].stride = std::numeric_limits<int64_t>::max(); }},
    {"an input between elements", kAny,
     [](Everything& e) { e.step.inputs[0].data = static_cast<char*>(e.step.inputs[0].data) + (e.index_input() == 0 ? 4 : 2); }},
    {"an output between elements", kAny,
     [](Everything& e) { e.step.outputs[0].data = static_cast<char*>(e.step.outputs[0].data) + (e.step.op == Q4_ARGMAX ? 4 : 2); }},
    {"more rows of y than of x", kAny, [](Everything& e) { e.step.op == Q4_STORE ? e.step.outputs[0].rows = 4 : e.step.outputs[0].rows = 77; }},
    {"no inputs", kAny, [](Everything& e) { e.step.input_count = 0; }},
    {"an input too many", kAny, [](Everything& e) { ++e.step.input_count; }},
    {"an output too many", kAny, [](Everything& e) { ++e.step.output_count; }},
    {"a number too many", kAny, [](Everything& e) { ++e.step.number_count; }},
    {"many inputs", kAny, [](Everything& e) { e.step.input_count = 1000; }},
    {"operation -1", kAny, [](Everything& e) { e.step.op = -1; }},
    {"operation 20", kAny, [](Everything& e) { e.step.op = Q4_TOP_K + 1; }},
    {"an output over half of the input", kAny,
     [](Everything& e) {
         const int at = e.index_input() == 0 ? 1 : 0;
         if (e.step.op == Q4_ARGMAX)
             e.step.outputs[0].data = e.step.inputs[0].data;
         else
             e.step.outputs[0].data = static_cast<float*>(e.step.inputs[at].data) + 4;
     }},
    {"a layer for a norm", Q4_RMS_NORM, [](Everything& e) { e.step.layer = &e.layer; }},
    {"eps below 0", Q4_RMS_NORM, [](Everything& e) { e.step.numbers[0] = -1.0; }},
    {"eps that is no number", Q4_LAYER_NORM, [](Everything& e) { e.step.numbers[0] = std::numeric_limits<double>::quiet_NaN(); }},
    {"a shift of 0.5", Q4_RMS_NORM, [](Everything& e) { e.step.numbers[1] = 0.5; }},
    {"a short weight", Q4_RMS_NORM, [](Everything& e) { e.step.inputs[1].columns = kWidth - 1; }},
    {"a short bias", Q4_LAYER_NORM, [](Everything& e) { e.step.inputs[2].columns = kWidth - 1; }},
    {"half a bias", Q4_LINEAR, [](Everything& e) { e.step.numbers[0] = 0.5; }},
    {"a bias that is not announced", Q4_LINEAR, [](Everything& e) { e.step.numbers[0] = 0.0; }},
    {"a weight of other columns", Q4_LINEAR, [](Everything& e) { e.step.inputs[1].columns = 32; }},
    {"a packed layer of another width", Q4_LINEAR, [](Everything& e) { e.pack(), e.layer.matrix.columns = 96; }},
    {"a packed layer that makes no sense", Q4_LINEAR, [](Everything& e) { e.pack(), e.layer.matrix.bits = 5; }},
    {"a packed layer without tiles", Q4_LINEAR, [](Everything& e) { e.pack(), e.layer.tiles = nullptr; }},
    {"a family that is none", Q4_LINEAR, [](Everything& e) { e.pack(), e.layer.family = -1; }},
    {"a packed embedding without tiles", Q4_EMBEDDING, [](Everything& e) { e.pack(), e.layer.tiles = nullptr; }},
    {"a packed embedding of another width", Q4_EMBEDDING, [](Everything& e) { e.pack(), e.layer.matrix.columns = 96; }},
    {"two global scales", Q4_EMBEDDING, [](Everything& e) { e.pack(), e.layer.global_scale = e.x.data(), e.layer.global_count = 2; }},
    {"tokens in rows", Q4_EMBEDDING, [](Everything& e) { e.step.inputs[0].rows = 2, e.step.outputs[0].rows = 2; }},
    {"a table of odd columns", Q4_ROTARY, [](Everything& e) { e.step.inputs[1].columns = 15; }},
    {"a table wider than a head", Q4_ROTARY, [](Everything& e) { e.step.inputs[1].columns = 32, e.step.inputs[1].rows = 2, e.step.inputs[1].stride = 32; }},
    {"neighbours in part", Q4_ROTARY, [](Everything& e) { e.step.numbers[0] = 2.0; }},
    {"two positions", Q4_ROTARY, [](Everything& e) { e.step.inputs[2].columns = e.step.inputs[2].stride = 2; }},
    {"a cache of odd rows", Q4_STORE, [](Everything& e) { e.step.outputs[0].rows = kHeads * kCapacity - 1; }},
    {"a cache of bfloat16", kAny, [](Everything& e) { e.step.cache_type = Q4_BF16; }},
    {"a type of a cache that is none", Q4_ADD, [](Everything& e) { e.step.cache_type = Q4_F16; }},
    {"a cache of int8 without scales", Q4_STORE, [](Everything& e) { e.step.cache_type = Q4_I8; }},
    {"keys and values of int8 without scales", Q4_ATTENTION, [](Everything& e) { e.step.cache_type = Q4_I8; }},
    {"no kv heads", Q4_ATTENTION, [](Everything& e) { e.step.numbers[0] = 0.0; }},
    {"two kv heads of three", Q4_ATTENTION, [](Everything& e) { e.step.numbers[0] = 2.0; }},
    {"kv heads in part", Q4_ATTENTION, [](Everything& e) { e.step.numbers[0] = 1.5; }},
    {"a negative window", Q4_ATTENTION, [](Everything& e) { e.step.numbers[2] = -1.0; }},
    {"keys of other columns", Q4_ATTENTION, [](Everything& e) { e.step.inputs[1].columns = 8; }},
    {"fewer values than keys", Q4_ATTENTION, [](Everything& e) { e.step.inputs[2].rows = kHeads; }},
    {"no heads", Q4_ATTEND_SPANS, [](Everything& e) { e.step.numbers[0] = e.step.numbers[1] = 0.0; }},
    {"two kv heads of three for spans", Q4_ATTEND_SPANS, [](Everything& e) { e.step.numbers[1] = 2.0; }},
    {"heads of other columns", Q4_ATTEND_SPANS, [](Everything& e) { e.step.numbers[0] = e.step.numbers[1] = 5.0; }},
    {"keys of one head of three", Q4_ATTEND_SPANS, [](Everything& e) { e.step.numbers[1] = 1.0; }},
    {"fewer values than keys of spans", Q4_ATTEND_SPANS, [](Everything& e) { e.step.inputs[2].rows = 2; }},
    {"one number for a span", Q4_ATTEND_SPANS, [](Everything& e) { e.step.inputs[3].columns = 1; }},
    {"two spans for a mean", Q4_MEAN_SPANS, [](Everything& e) { e.step.inputs[1].columns = e.step.inputs[1].stride = 4; }},
    {"a mean of other columns", Q4_MEAN_SPANS, [](Everything& e) { e.step.outputs[0].columns = 16; }},
    {"two rows for one", Q4_ADD, [](Everything& e) { e.step.inputs[1].rows = 2, e.step.inputs[1].columns = e.step.inputs[1].stride = 24; }},
    {"k of 0", Q4_TOP_K, [](Everything& e) { e.step.numbers[0] = 0.0; }},
    {"k above the columns", Q4_TOP_K, [](Everything& e) { e.step.numbers[0] = kWidth + 1.0; }},
    {"columns over the numbers", Q4_TOP_K, [](Everything& e) { e.step.outputs[1].data = e.y.data(); }},
};

int32_t make(const std::vector<q4_step>& steps, int32_t threads, int32_t isa, q4_program*& program) {
    program = nullptr;
    return q4_cpu_program_make(steps.data(), static_cast<int64_t>(steps.size()), threads, isa, nullptr, nullptr, 0, &program);
}

int judge_steps(int32_t isa) {
    int failures = 0;
    const auto fail = [&](const char* what, int op, int status) {
        ++failures, std::printf("program-bad: %s, operation %d: returned %d\n", what, op, status);
    };
    for (int32_t op = Q4_EMBEDDING; op <= Q4_MEAN_SPANS; op = op == Q4_TOP_K ? Q4_ATTEND_SPANS : op + 1) {
        const Everything good(Q4_COPY, isa);
        for (const bool is_packed : {false, true}) {
            Everything e(op, isa);
            if (is_packed && op > Q4_LINEAR) continue;
            if (is_packed) e.pack();
            q4_program* program;
            const int32_t status = make({e.step}, 2, isa, program);
            if (status != 0 || q4_cpu_program_run(program, 2, 1, nullptr, nullptr) != 0) fail("a sound step", op, status);
            // Numbers that are out of range are reported by the step, before the steps ahead of it write.
            for (const int64_t bad : {int64_t{-1}, int64_t{kCapacity} + (is_packed ? kWidth : 0), std::numeric_limits<int64_t>::max(),
                                      std::numeric_limits<int64_t>::min()}) {
                if (e.index_input() < 0) break;
                Everything other(Q4_COPY, isa);
                q4_program* both;
                if (make({other.step, e.step}, 2, isa, both) != 0) fail("two sound steps", op, -1);
                std::fill(e.y.begin(), e.y.end(), -7.0f);
                e.index[0] = bad;
                const int32_t told = q4_cpu_program_run(both, 2, 1, nullptr, nullptr);
                if (told != 2) fail("an index that is out of range", op, told);
                for (const float number : e.y) failures += number != -7.0f;
                for (const float number : other.y) failures += number != -7.0f;
                e.index[0] = 1;
                if (q4_cpu_program_run(both, 2, 1, nullptr, nullptr) != 0) fail("an index that is in range again", op, -1);
                q4_cpu_program_free(both);
            }
            q4_cpu_program_free(program);
        }
        for (const Spoilt& item : kSpoilt) {
            if (item.op != kAny && item.op != op) continue;
            Everything e(op, isa);
            item.spoil(e);
            q4_program* program;
            const int32_t status = make({good.step, e.step}, 2, isa, program);
            if (status != 2 || program) fail(item.what, op, status);
            q4_cpu_program_free(program);
        }
    }
    for (const int32_t op : {Q4_ATTEND_SPANS, Q4_MEAN_SPANS}) {
        Everything e(op, isa);
        q4_program* program;
        if (make({e.step}, 2, isa, program) != 0) fail("a sound step of spans", op, -1);
        for (const auto [first, last] : {std::pair<int64_t, int64_t>{3, 3}, {4, 3}, {0, kCapacity + 1}}) {
            e.index[0] = first, e.index[1] = last;
            if (q4_cpu_program_run(program, 2, 1, nullptr, nullptr) != 1) fail("a span that is none", op, -1);
        }
        e.index[0] = 0, e.index[1] = kCapacity;
        if (q4_cpu_program_run(program, 2, 1, nullptr, nullptr) != 0) fail("a span of all rows", op, -1);
        q4_cpu_program_free(program);
    }
    // A position that a step before gives can't be looked at before the run.
    Everything largest(Q4_ARGMAX, isa), store(Q4_STORE, isa);
    store.step.inputs[1].data = largest.columns.data();
    q4_program* program;
    if (make({largest.step, store.step}, 1, isa, program) != 2) fail("a position that is made", Q4_STORE, 0);
    if (make({store.step, largest.step}, 1, isa, program) != 0) fail("a position that is made afterwards", Q4_STORE, 0);
    q4_cpu_program_free(program);
    const q4_step* step = &store.step;
    const auto refused = [&](const char* what, int32_t status) {
        if (status != -1) fail(what, 0, status);
    };
    refused("no steps", q4_cpu_program_make(nullptr, 1, 1, isa, nullptr, nullptr, 0, &program));
    refused("0 steps", q4_cpu_program_make(step, 0, 1, isa, nullptr, nullptr, 0, &program));
    refused("nowhere to put a program", q4_cpu_program_make(step, 1, 1, isa, nullptr, nullptr, 0, nullptr));
    refused("no threads", q4_cpu_program_make(step, 1, 0, isa, nullptr, nullptr, 0, &program));
    refused("no instruction set", q4_cpu_program_make(step, 1, 1, Q4_ISA_NONE, nullptr, nullptr, 0, &program));
    refused("no program", q4_cpu_program_run(nullptr, 1, 1, nullptr, nullptr));
    if (make({store.step}, 1, isa, program) != 0) fail("a sound program", 0, 0);
    refused("a run without threads", q4_cpu_program_run(program, 0, 1, nullptr, nullptr));
    q4_cpu_program_free(program);
    q4_cpu_program_free(nullptr);
    return failures;
}

int judge_memory(int32_t isa) {
#ifdef Q4_COUNTS_MEMORY
    int failures = 0;
    for (const int32_t family : {Q4_EXACT, Q4_A8})
        for (const int threads : {1, 2, 4}) {
            ProgramLoad load(5, family, isa, threads);
            load.settle();
            // The runtime takes memory when its threads begin, which another process's load may put off.
            int64_t taken = 1;
            for (int turn = 0; turn < 4 && taken; ++turn) {
                const int64_t before = t_taken;
                for (int i = 0; i < 20; ++i) load.reset(), failures += load.run(threads) != 0;
                taken = t_taken - before;
            }
            if (!taken) continue;
            ++failures;
            std::printf("program-bad: 20 runs on %d threads took memory %lld times\n", threads, static_cast<long long>(taken));
        }
    return failures;
#else
    (void)isa;
    return 0;
#endif
}

}  // namespace

int bad_programs(const Arguments& a) {
    int failures = 0;
    for (const Isa& isa : a.isas) failures += judge_steps(isa.number) + judge_memory(isa.number);
    std::printf("program-bad: %s\n", failures ? "FAILED" : "passed");
    return failures ? 1 : 0;
}

}  // namespace q4test
