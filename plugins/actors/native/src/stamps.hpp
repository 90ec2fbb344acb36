// Stamps of rows in shared memory: numbers that say how far a writer is, and how to wait for one.
//
// A writer stores its rows and then its stamp, with release order; who loads a stamp, with acquire order, sees the rows
// up to it. Each stamp has one writer and a cache line of its own. Whoever waits looks for a while, since to wake an idle
// core takes longer than most steps, and sleeps then. docs/memory-protocols.md argues it; tests/protocols searches it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cells.hpp"

namespace q4 {

// How long a waiting thread looks before it sleeps, and how long it sleeps at most: who would wake it may be killed.
constexpr int64_t kSpinNs = 40'000, kSleepNs = 10'000'000;
enum Waited { kLate = 0, kReached = 1, kStopped = 2 };

struct alignas(64) Stamp {
    int64_t value;
    int64_t awaited;
    int64_t unused[6];
};

struct Need {
    int64_t stamp;  // which
    int64_t least;
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Stamps {
  public:
    Stamps(void* memory, int64_t count) : stamps_(static_cast<Stamp*>(memory)), count_(count) {}

    int64_t count() const { return count_; }
    int64_t value(int64_t which) const { return load(stamps_[which].value); }

    // Publish all that this thread stored before. A stamp may also be set back, while nobody waits for it.
    void publish(int64_t which, int64_t value) {
        Stamp& stamp = stamps_[which];
        store(stamp.value, value);
        fence();
        if (load(stamp.awaited) == 0) return;
        store(stamp.awaited, int64_t{0});
        syscall(SYS_futex, half(stamp), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }

    // Whether all are reached; `begin` skips those that are.
    bool reached(const Need*& begin, const Need* end) const {
        while (begin != end && value(begin->stamp) >= begin->least) ++begin;
        return begin == end;
    }

    // Wait until all are reached, or the stamp `stop`, −1 for none, is not 0, or for so long.
    Waited wait(const Need* begin, const Need* end, int64_t stop, double seconds) const {
        const int64_t started = now_ns(), deadline = started + static_cast<int64_t>(std::min(seconds, 1e9) * 1e9);
        for (int looks = 0;; ++looks) {
            if (reached(begin, end)) return kReached;
            if (stop >= 0 && value(stop) != 0) return kStopped;
            if (looks % 16 != 0) {
                relax();
                continue;
            }
            const int64_t now = now_ns();
            if (now >= deadline) return kLate;
            if (now - started >= kSpinNs) sleep(*begin, std::min(deadline - now, kSleepNs));
        }
    }

  private:
    void sleep(const Need& need, int64_t most_ns) const {
        Stamp& stamp = stamps_[need.stamp];
        store(stamp.awaited, int64_t{1});
        fence();  // who publishes looks for this after its store
        const int64_t known = load(stamp.value);
        if (known >= need.least) return;
        timespec time{};
        time.tv_nsec = static_cast<long>(most_ns);
        syscall(SYS_futex, half(stamp), FUTEX_WAIT, static_cast<uint32_t>(known), &time, nullptr, 0);
    }

    // A futex has 32 bits: those that differ from stamp to stamp.
    static uint32_t* half(Stamp& stamp) {
        auto* halves = reinterpret_cast<uint32_t*>(&stamp.value);
        return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
    }

    Stamp* stamps_;
    int64_t count_;
};

// The turns of who computes steps in rounds of one call: before a step it waits for what the step reads, after it it publishes
// what the step gave. Steps are counted from 1, and a need of `least` −d is of the stamp d steps before.
class Turns {
  public:
    Turns(Stamps stamps, std::vector<int64_t> own, std::vector<Need> needs, int64_t stop, double seconds)
        : stamps_(stamps), own_(std::move(own)), needs_(std::move(needs)), now_(needs_), stop_(stop), seconds_(seconds) {}

    void begin(int64_t first) { first_ = first; }

    // Whether the run goes on with a round: it does not where its needs come late, or the stamp `stop` is not 0.
    bool turn(int64_t round, int64_t rounds) {
        const int64_t step = first_ + round;
        for (int64_t which : own_) {
            if (round > 0 && stamps_.value(which) < step - 1) stamps_.publish(which, step - 1);  // else a predecessor did
        }
        if (round == rounds) return true;
        for (size_t i = 0; i < needs_.size(); ++i) now_[i].least = step + needs_[i].least;
        return stamps_.wait(now_.data(), now_.data() + now_.size(), stop_, seconds_) == kReached;
    }

    // The same as a function of C.
    static int32_t call(void* turns, int64_t round, int64_t rounds) { return static_cast<Turns*>(turns)->turn(round, rounds) ? 0 : 1; }

  private:
    Stamps stamps_;
    std::vector<int64_t> own_;
    std::vector<Need> needs_, now_;
    int64_t stop_;
    double seconds_;
    int64_t first_ = 1;
};

static_assert(sizeof(Stamp) == 64, "a stamp has a cache line of its own");

}  // namespace q4
