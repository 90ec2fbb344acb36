// Threads that run chunks over rings and stamps, for a thread sanitizer: each reads what its neighbour gave some steps
// before, some restart from their committed step, and all must read what was written. Every other chunk goes by turns, as one
// call does it. "race" reads without a wait.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "../src/stamps.hpp"

namespace {

constexpr int kActors = 3, kWords = 5, kDelay = 2, kChunk = 8, kSlots = kDelay + 2 * kChunk + 1;
constexpr int kCommitted = kActors, kHalt = kActors + 1, kStamps = kActors + 2;

struct Shared {
    alignas(64) q4::Stamp stamps[kStamps];
    int64_t rows[kActors][kSlots][kWords];
};

int64_t given(int actor, int64_t step, int word) { return step <= 0 ? 0 : actor * 1'000'003 + step * 97 + word; }

bool run(Shared& shared, int self, int64_t steps, bool is_racing) {
    q4::Stamps stamps(shared.stamps, kStamps);
    const int source = (self + kActors - 1) % kActors;
    q4::Turns turns(stamps, {self}, {{source, -kDelay}, {kCommitted, -(kSlots - kDelay)}}, kHalt, 0.01);
    int64_t committed = 0;
    bool has_failed = false, is_right = true;
    for (int64_t step = 1; step <= steps; ++step) {
        const bool is_by_turns = (step - 1) / kChunk % 2 == 1;
        const q4::Need needs[] = {{source, step - kDelay}, {kCommitted, step - (kSlots - kDelay)}};
        turns.begin(step);
        while (!is_racing && !(is_by_turns ? turns.turn(0, 1) : stamps.wait(needs, needs + 2, kHalt, 0.01) == q4::kReached)) {}
        for (int word = 0; word < kWords && step > kDelay; ++word) {
            const int64_t seen = shared.rows[source][(step - kDelay - 1) % kSlots][word];
            is_right = is_right && seen == given(source, step - kDelay, word);
        }
        if (stamps.value(self) < step) {  // else a predecessor has published the same
            for (int word = 0; word < kWords; ++word) shared.rows[self][(step - 1) % kSlots][word] = given(self, step, word);
            if (!is_by_turns) stamps.publish(self, step);
        }
        if (is_by_turns) turns.turn(1, 1);
        if (step % 61 == 0 && !has_failed) {  // it was killed, and its successor begins with the chunk
            has_failed = true;
            step = committed;
        } else if (step % kChunk == 0) {
            has_failed = false;
            committed = step;
            if (self == 0) {  // as the driver: the slowest of all
                const q4::Need all[] = {{0, step}, {1, step}, {2, step}};
                while (!is_racing && stamps.wait(all, all + 3, kHalt, 0.01) != q4::kReached) {}
                stamps.publish(kCommitted, step - kChunk);
            }
        }
    }
    return is_right;
}

}  // namespace

int main(int count, char** arguments) {
    const bool is_racing = count > 1 && std::strcmp(arguments[1], "race") == 0;
    static Shared shared{};
    std::vector<std::thread> threads;
    bool is_right[kActors] = {};
    for (int self = 0; self < kActors; ++self) {
        threads.emplace_back([&, self] { is_right[self] = run(shared, self, 20'000, is_racing); });
    }
    for (auto& thread : threads) thread.join();
    for (bool one : is_right) {
        if (!one) return std::puts("stamps: a wrong row"), 1;
    }
    return std::puts("stamps: passed"), 0;
}
