// The Python face of the C ABI: addresses come as integers, because a call must cost less than a microsecond.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace {

template <class T> T* at(uintptr_t address) { return reinterpret_cast<T*>(address); }

// Python's lock, once released, comes back from a busy thread only after its switch interval, 5 ms by default. A call keeps it
// unless it takes longer than about 200 µs: bytes of tiles, and eighths of a product, at 40 GB/s and 600 GFLOP/s.
constexpr double kReleaseWork = 8e6;
// Codes that are packed or unpacked in that time.
constexpr double kReleaseCodes = 65536;
// Rounds of a program.
constexpr int64_t kShortRounds = 8;

template <class Call> void run(bool is_long, const Call& call) {
    if (is_long) {
        nb::gil_scoped_release release;
        call();
    } else {
        call();
    }
}

class Matrix {
  public:
    Matrix(int64_t rows, int64_t columns, int64_t block, int64_t super_blocks, int bits, int held_bits, int first, int scale_type, int second,
           int second_type, bool is_unsigned, const std::vector<float>& codebook, const std::vector<int>& level, float center,
           float step, const std::vector<int>& word, float word_step) {
        matrix_ = q4_matrix{};
        matrix_.rows = rows, matrix_.columns = columns, matrix_.block = block, matrix_.super_blocks = super_blocks;
        matrix_.held_bits = held_bits, matrix_.first = first;
        matrix_.bits = bits, matrix_.scale_type = scale_type, matrix_.second = second, matrix_.second_type = second_type;
        matrix_.is_unsigned = is_unsigned;
        if (codebook.size() != 16 || level.size() != 16 || word.size() != 16) throw std::invalid_argument("tables must be 16 long");
        for (int i = 0; i < 16; ++i) {
            matrix_.codebook[i] = codebook[static_cast<size_t>(i)];
            matrix_.level[i] = static_cast<uint8_t>(level[static_cast<size_t>(i)]);
            matrix_.word[i] = static_cast<int16_t>(word[static_cast<size_t>(i)]);
        }
        matrix_.center = center, matrix_.step = step, matrix_.word_step = word_step;
        bytes_ = q4_cpu_prepared_bytes(&matrix_);
        if (bytes_ < 0) throw std::invalid_argument("the matrix makes no sense");
    }

    int64_t prepared_bytes() const { return bytes_; }
    const q4_matrix& description() const { return matrix_; }

    void pack(uintptr_t codes, int64_t code_row, int64_t code_group, int64_t code_byte, int64_t group_bytes, int order,
              int half, uintptr_t scale, int64_t scale_row, int64_t scale_block, uintptr_t second, int64_t second_row,
              int64_t second_block, uintptr_t super_scale, int64_t super_scale_step, uintptr_t super_second,
              int64_t super_second_step, uintptr_t tiles, int threads) const {
        const q4_source source{at<const uint8_t>(codes), code_row, code_group, code_byte, group_bytes, order, half,
                               at<const uint8_t>(scale), scale_row, scale_block, at<const uint8_t>(second), second_row,
                               second_block, at<const uint8_t>(super_scale), at<const uint8_t>(super_second), super_scale_step,
                               super_second_step};
        const bool is_long = codes_of(matrix_.rows) > kReleaseCodes;
        run(is_long, [&] { check(q4_cpu_pack(&matrix_, &source, at<uint8_t>(tiles), threads)); });
    }

    void unpack(uintptr_t tiles, uintptr_t rows, int64_t count, uintptr_t codes, uintptr_t scale, uintptr_t second,
                int threads) const {
        run(codes_of(count) > kReleaseCodes, [&] {
            check(q4_cpu_unpack(&matrix_, at<const uint8_t>(tiles), at<const int64_t>(rows), count, at<uint8_t>(codes),
                                at<uint8_t>(scale), at<uint8_t>(second), threads));
        });
    }

    // Returns how many rows of x had outliers.
    int64_t linear(uintptr_t tiles, uintptr_t global, int64_t global_count, bool divides, uintptr_t x, int64_t x_rows,
                int64_t x_stride, uintptr_t y, int64_t y_stride, uintptr_t bias, int type, int family, int threads, int isa,
                uintptr_t order, uintptr_t factor, int factor_type) const {
        q4_call call{};
        call.inputs = {at<const int64_t>(order), at<const void>(factor), factor_type};
        call.tiles = at<const uint8_t>(tiles);
        call.global_scale = at<const float>(global), call.global_count = global_count, call.global_divides = divides;
        call.x = at<const void>(x), call.x_rows = x_rows, call.x_stride = x_stride, call.x_type = type;
        call.y = at<void>(y), call.y_stride = y_stride, call.y_type = type, call.bias = at<const void>(bias);
        int64_t outlier_rows = 0;
        call.family = family, call.threads = threads, call.outlier_rows = &outlier_rows;
        const double work = static_cast<double>(bytes_) + static_cast<double>(x_rows) * codes_of(matrix_.rows) / 8;
        run(work > kReleaseWork, [&] { check(q4_cpu_linear(&matrix_, &call, isa)); });
        return outlier_rows;
    }

    void spikes(uintptr_t tiles, uintptr_t global, int64_t global_count, bool divides, uintptr_t x, int64_t rows, uintptr_t y,
                uintptr_t bias, int threads, int isa, uintptr_t order) const {
        const q4_spikes call{at<const uint8_t>(tiles), at<const float>(global), global_count, divides, at<const uint8_t>(x),
                             rows, matrix_.columns, at<float>(y), matrix_.rows, at<const float>(bias), threads, at<const int64_t>(order)};
        // Spikes are worth their while up to about a fifth of all in-features.
        const double work = static_cast<double>(rows) * codes_of(matrix_.rows) / 8;
        run(work > kReleaseWork, [&] { check(q4_cpu_spikes(&matrix_, &call, isa)); });
    }

  private:
    double codes_of(int64_t rows) const { return static_cast<double>(rows) * static_cast<double>(matrix_.columns); }
    static void check(int32_t status) {
        if (status == -2) throw std::bad_alloc();
        if (status != 0) throw std::invalid_argument("the native call was refused");
    }
    q4_matrix matrix_;
    int64_t bytes_ = 0;
};

// Steps are added one by one, then bound.
class Program {
  public:
    Program() = default;
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;
    ~Program() { q4_cpu_program_free(program_); }

    // views: address, rows, columns and stride of each, inputs first. tiles: 0 where there is no packed layer.
    void add(int op, const std::vector<int64_t>& views, int inputs, const std::vector<double>& numbers, const Matrix* matrix,
             uintptr_t tiles, uintptr_t global, int64_t global_count, bool divides, int family, uintptr_t order, uintptr_t factor,
             int factor_type, const std::vector<int64_t>& synapses, int cache_type) {
        q4_step step{};
        const auto outputs = static_cast<int>(views.size() / 4) - inputs;
        if (program_ || inputs < 0 || inputs > Q4_MOST_INPUTS || outputs < 0 || outputs > Q4_MOST_OUTPUTS ||
            numbers.size() > Q4_MOST_NUMBERS)
            throw std::invalid_argument("the step makes no sense");
        step.op = op, step.input_count = inputs, step.output_count = outputs, step.number_count = static_cast<int>(numbers.size()), step.cache_type = cache_type;
        for (int i = 0; i < inputs + outputs; ++i) {
            const int64_t* view = &views[static_cast<size_t>(4 * i)];
            (i < inputs ? step.inputs[i] : step.outputs[i - inputs]) = {at<void>(static_cast<uintptr_t>(view[0])), view[1], view[2], view[3]};
        }
        std::copy(numbers.begin(), numbers.end(), step.numbers);
        layers_.push_back(nullptr), synapses_.push_back(nullptr);
        if (synapses.size() == 10) {  // as of q4_synapses
            const auto address = [&](size_t i) { return static_cast<uintptr_t>(synapses[i]); };
            synapses_.back() = std::make_unique<q4_synapses>(
                q4_synapses{synapses[0], synapses[1], synapses[2], at<const int64_t>(address(3)), at<const int32_t>(address(4)),
                            at<const void>(address(5)), static_cast<int32_t>(synapses[6]), at<const uint8_t>(address(7)),
                            at<const uint8_t>(address(8)), at<const uint16_t>(address(9))});
            work_ += static_cast<double>(synapses[2]) / 4;
        }
        if (matrix) {
            layers_.back() = std::make_unique<q4_layer>(q4_layer{matrix->description(), at<const uint8_t>(tiles), at<const float>(global),
                                                                 global_count, divides, family,
                                                                 {at<const int64_t>(order), at<const void>(factor), factor_type}});
            work_ += static_cast<double>(matrix->prepared_bytes()) * (1.0 + static_cast<double>(views[1]) / 8);
        }
        steps_.push_back(step);
    }

    // streams: address and bytes of each. tokens: 0, or how many a run is of, at most `most`, of which the steps are. Returns 0, or
    // 1 + the number of the first step that can't be bound.
    int bind(int threads, int isa, uintptr_t clock, const std::vector<int64_t>& streams, uintptr_t tokens, int64_t most) {
        for (size_t i = 0; i < steps_.size(); ++i) steps_[i].layer = layers_[i].get(), steps_[i].synapses = synapses_[i].get();
        for (size_t i = 0; i + 1 < streams.size(); i += 2) streams_.push_back({at<void>(static_cast<uintptr_t>(streams[i])), streams[i + 1], 0});
        const int32_t status = q4_cpu_program_make(steps_.data(), static_cast<int64_t>(steps_.size()), threads, isa, at<int64_t>(clock),
                                                   streams_.data(), static_cast<int64_t>(streams_.size()), &program_);
        if (status == -2) throw std::bad_alloc();
        if (status < 0) throw std::invalid_argument("the program was refused");
        if (status == 0 && tokens && q4_cpu_program_tokens(program_, at<const int64_t>(tokens), most) != 0)
            throw std::invalid_argument("a step is of no tokens");
        return status;
    }

    // streams: address and step of each, in bytes. turn and context: 0, or addresses of what happens between rounds. Returns 0; 1 +
    // the number of a step whose token, position or clock is out of range; -4 where the number of tokens is.
    int run(int threads, int64_t rounds, const std::vector<int64_t>& streams, uintptr_t turn, uintptr_t context) {
        int32_t status = 0;
        if (streams.size() != 2 * streams_.size()) throw std::invalid_argument("the program has another number of streams");
        std::vector<q4_stream> given(streams_);  // of this call: another thread may make one
        for (size_t i = 0; i < given.size(); ++i) given[i].data = at<void>(static_cast<uintptr_t>(streams[2 * i])), given[i].step = streams[2 * i + 1];
        const q4_turns turns{reinterpret_cast<decltype(q4_turns::turn)>(turn), at<void>(context)};
        ::run(turn || rounds > kShortRounds || work_ > kReleaseWork,
              [&] { status = q4_cpu_program_run(program_, threads, rounds, given.data(), turn ? &turns : nullptr); });
        if (status == -3) throw std::runtime_error("the program is running already");
        if (status < 0 && status != -4) throw std::invalid_argument("the program was refused");
        return status;
    }

    // Of each step, how many rows of x had outliers in the last run; empty where none had.
    std::vector<int64_t> outlier_rows() const {
        std::vector<int64_t> rows;
        for (size_t i = 0; i < steps_.size(); ++i) {
            const int64_t found = q4_cpu_program_outlier_rows(program_, static_cast<int64_t>(i));
            if (found && rows.empty()) rows.resize(steps_.size());
            if (found) rows[i] = found;
        }
        return rows;
    }

  private:
    std::vector<q4_step> steps_;
    std::vector<std::unique_ptr<q4_layer>> layers_;
    std::vector<std::unique_ptr<q4_synapses>> synapses_;
    std::vector<q4_stream> streams_;
    q4_program* program_ = nullptr;
    double work_ = 0.0;  // as bytes of tiles
};

}  // namespace

NB_MODULE(_native, module) {
    q4::watch_forks();
    nb::set_leak_warnings(false);  // descriptions are cached for the life of the process
    module.attr("ABI_VERSION") = q4_cpu_abi_version();
    module.def("best_isa", &q4_cpu_best_isa, "The best instruction set for who does not ask for one.");
    module.def("has_isa", &q4_cpu_has_isa, "1 where this machine has it, 0 where not, -1 where it was not compiled in.");
    module.def("isa_was_run", [](int isa) { return q4_cpu_isa_was_run(isa) == 1; }, "Whether it was run on hardware.");
    module.def("panel_from", &q4_cpu_panel_from, "The rows of x from which a family has panels; 0 where it has none.");
    module.def("isa_name", &q4_cpu_isa_name, "Its name, or None where there is no such number.");
    nb::class_<Matrix>(module, "Matrix")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int, int, int, int, int, int, bool, const std::vector<float>&, const std::vector<int>&,
                      float, float, const std::vector<int>&, float>())
        .def_prop_ro("prepared_bytes", &Matrix::prepared_bytes)
        .def("pack", &Matrix::pack)
        .def("unpack", &Matrix::unpack)
        .def("linear", &Matrix::linear)
        .def("spikes", &Matrix::spikes);
    nb::class_<Program>(module, "Program")
        .def(nb::init<>())
        .def("add", &Program::add, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("bind", &Program::bind)
        .def("run", &Program::run)
        .def("outlier_rows", &Program::outlier_rows);
}
