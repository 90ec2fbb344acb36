// Threads of our own: they wait for a job a little while awake, then asleep.
//
// Each worker has a seat, a line of memory of its own, and is offered one part of a job there. The caller does the first
// part, and then every part that no worker has taken yet: a worker that wakes late, or that the machine has no core for,
// costs nothing but its help. A second caller at the same time runs alone. A child after a fork starts a pool of its own,
// because threads don't survive one.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace q4 {

static inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

class Pool {
  public:
    static constexpr int kMostThreads = 1024;
    using Part = void (*)(const void* body, int part);

    // Call call(body, part) once for each part of [0, parts), parts at most kMostThreads.
    void run(int parts, Part call, const void* body) {
        if (is_taken_.exchange(true, std::memory_order_acquire)) {
            for (int part = 0; part < parts; ++part) call(body, part);
            return;
        }
        grow(parts);
        call_ = call, body_ = body;
        const int offered = std::min(parts, count_);
        for (int part = 1; part < offered; ++part) seats_[part]->offer();
        call(body, 0);
        for (int part = offered; part < parts; ++part) call(body, part);
        for (int part = 1; part < offered; ++part)
            if (seats_[part]->take()) {
                call(body, part);
                seats_[part]->leave();
            }
        for (int part = 1; part < offered; ++part) seats_[part]->wait();
        is_taken_.store(false, std::memory_order_release);
    }

    static Pool& here() {
        Pool* pool = g_pool.load(std::memory_order_acquire);
        if (!pool) {
            // Never destroyed: workers may be asleep in it when the process ends.
            auto* fresh = new Pool;
            if (g_pool.compare_exchange_strong(pool, fresh))
                pool = fresh;
            else
                delete fresh;
        }
        return *pool;
    }

    static void forget() { g_pool.store(nullptr); }

  private:
#ifndef Q4_CPU_SPINS
#define Q4_CPU_SPINS 20000
#endif
    static constexpr int kSpins = Q4_CPU_SPINS;
    enum State { EMPTY, OFFERED, TAKEN };

    // What is offered in a seat is taken once, by its worker or by the caller; the job stays until all seats are empty.
    class alignas(64) Seat {
      public:
        void offer() {
            state_.store(OFFERED);
            if (!is_asleep_.load()) return;
            const std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_one();
        }
        bool take() {
            int offered = OFFERED;
            return state_.load(std::memory_order_relaxed) == OFFERED &&
                   state_.compare_exchange_strong(offered, TAKEN, std::memory_order_acquire, std::memory_order_relaxed);
        }
        void leave() { state_.store(EMPTY, std::memory_order_release); }
        void wait() const {
            for (int turn = 0; state_.load(std::memory_order_acquire) != EMPTY; ++turn) {
                if (turn < kSpins)
                    pause_core();
                else
                    std::this_thread::yield();
            }
        }
        void sleep() {
            std::unique_lock<std::mutex> lock(mutex_);
            is_asleep_.store(true);
            wake_.wait(lock, [this] { return state_.load() == OFFERED; });
            is_asleep_.store(false);
        }

      private:
        std::atomic<int> state_{EMPTY};
        std::atomic<bool> is_asleep_{false};
        std::mutex mutex_;
        std::condition_variable wake_;
    };

    void work(Seat& seat, int part) {
        for (;; seat.sleep())
            for (int turn = 0; turn < kSpins; ++turn, pause_core())
                if (seat.take()) {
                    call_(body_, part);
                    seat.leave();
                    turn = 0;
                }
    }

    void grow(int threads) {
        try {
            for (; count_ < threads; ++count_) {
                auto seat = std::make_unique<Seat>();
                std::thread(&Pool::work, this, std::ref(*seat), count_).detach();
                seats_[count_] = seat.release();  // for as long as its worker
            }
        } catch (const std::exception&) {  // as many as the machine gives
        }
    }

    static inline std::atomic<Pool*> g_pool{nullptr};
    alignas(64) std::atomic<bool> is_taken_{false};
    int count_ = 1;  // the caller
    alignas(64) Part call_ = nullptr;
    const void* body_ = nullptr;
    Seat* seats_[kMostThreads] = {};
};

}  // namespace q4
