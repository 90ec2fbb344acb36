// When to stop sharing work: where another process has the core of one of our threads, the rest wait for it as long as
// the system lets that process run, milliseconds for work of microseconds. After such a wait calls run alone for a
// while, and longer each time that it recurs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

// A wait longer than one's own part by this much is no mere imbalance.
#ifndef Q4_CPU_STALL_NS
#define Q4_CPU_STALL_NS 500000
#endif

namespace q4 {

class Patience {
  public:
    bool is_alone(int64_t now_ns) const { return now_ns < until_.load(std::memory_order_relaxed); }

    // Called after each shared call: when it began, when the caller had finished its own part, and when all had.
    void judge(int64_t start_ns, int64_t done_ns, int64_t end_ns) {
        const int64_t waited = end_ns - done_ns, factor = factor_.load(std::memory_order_relaxed);
        if (waited < done_ns - start_ns + Q4_CPU_STALL_NS) {
            factor_.store(std::max(factor / 2, kLeast), std::memory_order_relaxed);
            return;
        }
        until_.store(end_ns + factor * std::min(waited, kLongest), std::memory_order_relaxed);
        factor_.store(std::min(factor * 2, kMost), std::memory_order_relaxed);
    }

  private:
    // A process that was stopped has waited for hours, which says nothing about others.
    static constexpr int64_t kLongest = 20'000'000;
    static constexpr int64_t kLeast = 4, kMost = 32;  // how many waits long a time alone is: waiting takes a fifth of all time at most, at last 3 %
    std::atomic<int64_t> until_{0}, factor_{kLeast};  // callers may overwrite each other's verdict, which does no harm
};

}  // namespace q4
