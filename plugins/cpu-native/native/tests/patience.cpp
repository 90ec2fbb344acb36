// `patience`: when calls stop sharing their work, and for how long.
#include "patience.hpp"

#include <cstdio>

#include "commands.hpp"

namespace q4test {
namespace {

constexpr int64_t kUs = 1000, kMs = 1000 * kUs;

// A call that begins now and waits 6 ms for another thread; returns when it ends.
int64_t stall(q4::Patience& patience, int64_t now) {
    patience.judge(now, now + 10 * kUs, now + 10 * kUs + 6 * kMs);
    return now + 10 * kUs + 6 * kMs;
}

// How long calls run alone after a moment.
int64_t alone_ms(const q4::Patience& patience, int64_t now) {
    int64_t ms = 0;
    while (patience.is_alone(now + ms * kMs)) ++ms;
    return ms;
}

}  // namespace

int patience() {
    int failures = 0;
    const auto check = [&failures](bool is_right, const char* what) {
        if (!is_right) ++failures, std::printf("patience: wrong: %s\n", what);
    };
    q4::Patience patience;
    check(!patience.is_alone(0), "nothing happened, and work is shared");
    patience.judge(0, 10 * kUs, 400 * kUs);
    check(!patience.is_alone(400 * kUs), "a short wait does no harm");
    patience.judge(kMs, 11 * kMs, 20 * kMs);
    check(!patience.is_alone(20 * kMs), "nor does a wait shorter than the call's own work");
    int64_t now = stall(patience, 100 * kMs);
    check(alone_ms(patience, now) == 24, "after a stall of 6 ms, alone for four times as long");
    now = stall(patience, now + 24 * kMs);
    check(alone_ms(patience, now) == 48, "longer where it recurs at once");
    for (int i = 0; i < 9; ++i) now = stall(patience, now + 192 * kMs);
    check(alone_ms(patience, now) == 192, "but no longer than 32 times");
    now += 192 * kMs;
    check(!patience.is_alone(now), "then work is shared again");
    for (int i = 0; i < 9; ++i) patience.judge(now, now + 10 * kUs, now + 12 * kUs);
    now = stall(patience, now);
    check(alone_ms(patience, now) == 24, "and calls without a stall let it be forgotten");
    now += 24 * kMs;
    patience.judge(now, now + 10 * kUs, now + 3600 * 1000 * kMs);
    now += 3600 * 1000 * kMs;
    check(alone_ms(patience, now) <= 20 * 32, "a process that was stopped for an hour is patient again within a second");
    std::printf("patience: %s\n", failures ? "FAILED" : "passed");
    return failures ? 1 : 0;
}

}  // namespace q4test
