// `threads`: calls from several threads at once; `fork`: calls in children. Whoever hangs is ended by an alarm.
#include <atomic>
#include <cstdio>
#include <functional>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "commands.hpp"
#include "load.hpp"

namespace q4test {
namespace {

constexpr unsigned kPatience = 60;  // seconds

// Whether a child that does this ends, soon and well.
bool in_child(const std::function<bool()>& work) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(kPatience);
        _exit(work() ? 0 : 1);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int tell(const char* name, int failures) {
    std::printf("%s: %s\n", name, failures ? "FAILED" : "passed");
    return failures ? 1 : 0;
}

}  // namespace

int threads(const Arguments& a) {
    alarm(kPatience);
    int failures = 0;
    for (const Isa& isa : a.isas) {
        // Callers that share a matrix would share y: each has its own, of another size.
        Load loads[] = {{1, Q4_A8, isa.number, 512, 512, 4}, {2, Q4_EXACT, isa.number, 384, 640, 5}, {3, Q4_A8, isa.number, 1040, 256, 33},
                        {4, Q4_A16, isa.number, 512, 512, 4}, {5, Q4_A16, isa.number, 1040, 256, 50}};
        for (Load& load : loads) load.settle();
        std::atomic<int> wrong{0};
        std::vector<std::thread> callers;
        for (Load& load : loads)
            callers.emplace_back([&load, &wrong] {
                for (int i = 0; i < 60; ++i) wrong += !load.runs(1 + i % 3) + (i % 8 == 0 && !load.packs(2));
            });
        ProgramLoad programs[] = {{11, Q4_A8, isa.number, 3}, {12, Q4_EXACT, isa.number, 2}};
        for (ProgramLoad& load : programs) load.settle();
        for (ProgramLoad& load : programs)
            callers.emplace_back([&load, &wrong] {
                for (int i = 0; i < 30; ++i) wrong += !load.runs(1 + i % 3);
            });
        for (std::thread& caller : callers) caller.join();
        // One program that several threads run: calls that come while it runs report it.
        callers.clear();
        programs[0].reset();
        std::atomic<int> ran{0};
        for (int i = 0; i < 3; ++i)
            callers.emplace_back([&] {
                for (int turn = 0; turn < 20; ++turn) {
                    const int32_t status = programs[0].run(2);
                    ran += status == 0, wrong += status != 0 && status != -3;
                }
            });
        for (std::thread& caller : callers) caller.join();
        wrong += ran == 0;
        failures += wrong;
        // Threads end, and others come: what they held for themselves goes with them.
        for (int i = 0; i < 20; ++i) std::thread([&] { failures += !loads[0].runs(2); }).join();
    }
    return tell("threads", failures);
}

int forks(const Arguments& a) {
    alarm(kPatience);
    int failures = 0;
    const auto check = [&failures](bool is_right, const char* what) {
        if (!is_right) ++failures, std::printf("fork: wrong or late: %s\n", what);
    };
    for (const Isa& isa : a.isas) {
        Load load(1, Q4_A8, isa.number, 512, 512, 4), other(2, Q4_EXACT, isa.number, 512, 512, 4);
        load.settle(), other.settle();
        ProgramLoad program(3, Q4_A8, isa.number, 2);
        program.settle();
        check(in_child([&] { return program.runs(2); }), "a program in a child");
        check(program.runs(2) && in_child([&] { return program.runs(2) && program.runs(1); }), "a program in a child after it ran");
        check(in_child([&] { return load.runs(2) && load.packs(2); }), "a child from before the first threaded call");
        check(load.runs(2) && load.packs(2), "the parent");
        check(in_child([&] { return load.runs(2) && load.packs(2) && load.runs(3); }), "a child from after a threaded call");
        check(in_child([&] { return load.runs(2) && in_child([&] { return load.runs(2); }) && load.runs(2); }), "a child's child");
        check(in_child([&] {
                  std::atomic<int> wrong{0};
                  std::thread([&] { wrong += !load.runs(2); }).join();
                  return wrong == 0 && load.runs(2);
              }),
              "a thread of a child");
        // Forks in the midst of calls: whatever a caller held then, its copy in the child must not wait for.
        std::atomic<bool> is_over{false};
        std::atomic<int> wrong{0};
        std::thread caller([&] {
            while (!is_over) wrong += !other.runs(2);
        });
        for (int i = 0; i < 20; ++i) check(in_child([&] { return load.runs(2); }), "a child from the midst of another's call");
        is_over = true;
        caller.join();
        is_over = false;
        std::thread runner([&] {
            while (!is_over) wrong += !program.runs(2);
        });
        for (int i = 0; i < 20; ++i) check(in_child([&] { return program.runs(2); }), "a child from the midst of a program's run");
        is_over = true;
        runner.join();
        check(wrong == 0 && load.runs(2), "the parent afterwards");
    }
    return tell("fork", failures);
}

}  // namespace q4test
