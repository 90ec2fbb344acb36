// Where the threads of one run wait for each other between steps: spinning, because a step takes microseconds; after a while
// giving way, because another process may have the core of the one that is awaited.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "threads.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace q4 {

class Barrier {
  public:
    explicit Barrier(int threads) : seats_(static_cast<size_t>(threads)) {}

    // Before a run, by one thread.
    void reset() {
        for (Seat& seat : seats_) seat.turn.store(0, std::memory_order_relaxed);
        waited_ns_ = 0;
    }

    // Wait until each of the team has come here as often. Each looks at all others: one way between two cores.
    void wait(int me, int team) {
        const uint32_t turn = seats_[static_cast<size_t>(me)].turn.load(std::memory_order_relaxed) + 1;
        seats_[static_cast<size_t>(me)].turn.store(turn, std::memory_order_release);
        for (int other = 0; other < team; ++other) {
            const std::atomic<uint32_t>& awaited = seats_[static_cast<size_t>(other)].turn;
            for (int spins = 0; is_behind(awaited, turn); ++spins) {
                if (spins < kSpins)
                    pause();
                else
                    give_way(awaited, turn, me);
            }
        }
    }

    // How long the first thread waited beyond its spins.
    int64_t waited_ns() const { return waited_ns_; }

  private:
    static constexpr int kSpins = 1500;  // 20 to 50 µs
    struct alignas(64) Seat {
        std::atomic<uint32_t> turn{0};
    };

    static bool is_behind(const std::atomic<uint32_t>& awaited, uint32_t turn) {
        return static_cast<int32_t>(awaited.load(std::memory_order_acquire) - turn) < 0;
    }
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    void give_way(const std::atomic<uint32_t>& awaited, uint32_t turn, int me) {
        const int64_t start = now_ns();
        while (is_behind(awaited, turn)) sched_yield();
        if (me == 0) waited_ns_ += now_ns() - start;
    }

    std::vector<Seat> seats_;
    int64_t waited_ns_ = 0;
};

}  // namespace q4
