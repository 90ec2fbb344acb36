// `fuzz` and `guard`: random cases; `plant`: the same with a fault in each, which must be found.
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <sys/wait.h>

#include "check.hpp"
#include "commands.hpp"

namespace q4test {
namespace {

constexpr int kMostFailures = 10;

volatile uint64_t t_seed;
const char* t_command;
struct sigaction t_before;

// A touched page names its case; then whoever handled faults before does so again.
void name_case(int, siginfo_t*, void*) {
    char text[128];
    const int length = std::snprintf(text, sizeof text, "%s 1 %llu: memory was touched that may not be\n", t_command,
                                     static_cast<unsigned long long>(t_seed));
    if (write(2, text, static_cast<size_t>(length)) < 0) _exit(1);
    sigaction(SIGSEGV, &t_before, nullptr);
}

void name_faults(const char* command) {
    t_command = command;
    struct sigaction action {};
    action.sa_sigaction = name_case;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &t_before);
}

std::string check_all(const Case& c, Memory& memory, const std::vector<Isa>& isas, const char*& where) {
    uint8_t* tiles = nullptr;
    where = "any";
    std::string wrong = check_pack(c, memory, tiles);
    if (wrong.empty()) wrong = check_unpack(c, memory, tiles);
    const std::vector<Interval> intervals = expected(c);
    for (size_t i = 0; i < isas.size() && wrong.empty(); ++i) {
        where = isas[i].name;
        wrong = check_linear(c, memory, tiles, isas[i], intervals);
    }
    if (wrong.empty() && !memory.is_untouched()) wrong = "bytes around a buffer were written";
    return wrong;
}

// A guarded buffer does end the process that reads past it.
bool guards_bite(bool at_start) {
    const pid_t child = fork();
    if (child == 0) {
        if (!std::freopen("/dev/null", "w", stderr)) _exit(0);
        Memory memory(true);
        const volatile uint8_t* data = memory.take(100, 0, at_start);
        const uint8_t read = at_start ? data[-1] : data[100];
        _exit(read == 0xff ? 0 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int fuzz(const Arguments& a, bool is_guarded) {
    const char* command = is_guarded ? "guard" : "fuzz";
    if (is_guarded && !(guards_bite(false) && guards_bite(true))) {
        std::puts("a guard page let a read pass");
        return 1;
    }
    name_faults(command);
    Memory memory(is_guarded);
    int failures = 0;
    for (int64_t i = 0; i < a.count && failures < kMostFailures; ++i) {
        const uint64_t seed = a.seed + static_cast<uint64_t>(i);
        t_seed = seed;
        memory.clear();
        const Case c = make_case(seed, memory, a.sizes);
        const char* where;
        const std::string wrong = check_all(c, memory, a.isas, where);
        if (wrong.empty()) continue;
        ++failures;
        std::printf("%s 1 %llu %s: %s\n    %s\n", command, static_cast<unsigned long long>(seed), where, wrong.c_str(),
                    c.told().c_str());
    }
    if (!failures) std::printf("%s: %lld cases passed\n", command, static_cast<long long>(a.count));
    return failures ? 1 : 0;
}

namespace {

enum Fault { CODE, SCALE, SECOND, GLOBAL, BIAS, COARSE, ELEMENT, STRAY, STORED, FAULTS };
const char* const kFaults[] = {"code", "scale", "second", "global", "bias", "coarse", "element", "stray", "stored"};

void flip(uint8_t* byte, int bit) { *byte = static_cast<uint8_t>(*byte ^ 1 << bit); }

// Spoil a byte of codes; where few bits are held, one of these, for the others say nothing.
void flip_code(Random& r, const Case& c, int64_t n, int64_t k) {
    const q4_matrix& m = c.matrix;
    uint8_t* byte = c.code_at(n, k);
    if (m.held_bits == m.bits) {
        flip(byte, static_cast<int>(r.between(0, 7)));
        return;
    }
    const int first = m.first - (m.bits == 8 && !m.is_unsigned ? 128 : 0), bit = 1 << r.between(0, m.held_bits - 1);
    const int code = static_cast<uint8_t>(c.code(n, k) - first) ^ bit, upper = *byte >> 4;
    if (m.bits == 8)
        *byte = static_cast<uint8_t>(first + code);
    else
        *byte = static_cast<uint8_t>(upper == c.code(n, k) ? *byte % 16 | (first + code) << 4 : first + code + 16 * upper);
}

// Spoil what the kernels read; returns whether the case has such a thing.
bool spoil(Random& r, Case& c, Fault fault) {
    const q4_matrix& m = c.matrix;
    const int64_t n = r.between(0, m.rows - 1), k = r.between(0, m.columns - 1), block = r.between(0, c.blocks - 1);
    switch (fault) {
    case CODE:
    case STORED: flip_code(r, c, n, k); break;
    case SCALE: flip(c.number_at(false, n, block), static_cast<int>(r.between(0, 3))); break;
    case SECOND:
        if (m.second == Q4_NONE) return false;
        flip(c.number_at(true, n, block), static_cast<int>(r.between(0, 3)));
        break;
    case GLOBAL: {
        if (!c.call.global_scale) return false;
        auto* bytes = reinterpret_cast<uint8_t*>(const_cast<float*>(c.call.global_scale));
        flip(bytes + 4 * (c.call.global_count > 1 ? n : 0) + 2, 0);
        break;
    }
    case BIAS: {
        if (!c.call.bias) return false;
        auto* bytes = static_cast<uint8_t*>(const_cast<void*>(c.call.bias));
        flip(bytes + (n + 1) * width(c.call.y_type) - 1, 7);
        break;
    }
    case COARSE:  // int8 where int16 is asked for, of numbers that int8 can't hold
        if (c.call.family != Q4_A16 || c.call.x_type != Q4_F32) return false;
        c.call.family = Q4_A8;
        break;
    default: break;
    }
    c.read_source();
    c.read_call();
    return true;
}

bool tells_apart(const std::vector<Interval>& a, const std::vector<Interval>& b) {
    for (size_t i = 0; i < a.size(); ++i)
        if (a[i].excludes(b[i])) return true;
    return false;
}

}  // namespace

// A fault counts where the intervals of the right and the spoilt case don't meet: each of these must be found. How many
// there are says how sharp the bounds are.
int plant(const Arguments& a) {
    int64_t tried[FAULTS] = {}, visible[FAULTS] = {}, missed = 0;
    Memory memory(false);
    for (int64_t i = 0; i < a.count; ++i) {
        const uint64_t seed = a.seed + static_cast<uint64_t>(i);
        const auto fault = static_cast<Fault>(i % FAULTS);
        memory.clear();
        Random r(seed ^ 0x706c);
        Case c = make_case(seed, memory, a.sizes);
        const std::vector<Interval> intervals = expected(c);
        Case spoilt = c;
        if (!spoil(r, spoilt, fault)) continue;
        ++tried[fault];
        uint8_t* tiles = nullptr;
        bool is_visible = true, is_found;
        std::string wrong = check_pack(spoilt, memory, tiles);
        if (fault == STORED) {
            is_visible = spoilt.codes != c.codes;
            Case whole = c;
            is_found = false;
            // By rows, some other row may be all that comes back: ask until the whole does.
            for (uint64_t turn = 0; turn < 40 && !is_found; ++turn) whole.seed = seed + turn, is_found = !check_unpack(whole, memory, tiles).empty();
        } else {
            const int64_t row = r.between(0, c.call.x_rows - 1), n = r.between(0, c.matrix.rows - 1);
            const Interval& at = intervals[static_cast<size_t>(row * c.matrix.rows + n)];
            if (fault == ELEMENT) is_visible = !at.holds(0.0);
            if (fault < ELEMENT) is_visible = tells_apart(intervals, expected(spoilt));
            const auto after_call = [&] {
                if (fault == ELEMENT) std::memset(c.y_at(row, n), 0, static_cast<size_t>(width(c.call.y_type)));
                if (fault == STRAY) flip(r.chance(0.5) ? c.y_start - 1 : c.y_start + c.y_bytes, 3);
            };
            is_found = !check_linear(spoilt, memory, tiles, a.isas[static_cast<size_t>(i) % a.isas.size()], intervals, after_call).empty();
        }
        visible[fault] += is_visible;
        if (!is_visible || is_found) continue;
        ++missed;
        std::printf("plant: a fault of %s in case %llu was not found\n    %s\n", kFaults[fault],
                    static_cast<unsigned long long>(seed), c.told().c_str());
    }
    bool is_sharp = true;
    for (int fault = 0; fault < FAULTS; ++fault) {
        std::printf("plant: %s: %lld of %lld are visible\n", kFaults[fault], static_cast<long long>(visible[fault]),
                    static_cast<long long>(tried[fault]));
        // A spoilt bit may change nothing (a weight that x does not meet, equal levels, a last bit, 16-bit outputs).
        is_sharp = is_sharp && visible[fault] * 2 > tried[fault];
    }
    if (!is_sharp) std::puts("plant: the bounds are too wide to see most faults");
    return missed || !is_sharp ? 1 : 0;
}

}  // namespace q4test
