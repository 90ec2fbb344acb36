// Threads of our own: they wait for a job a little while awake, then asleep.
//
// A job is a number of parts that whoever comes first takes, the caller too: a worker that wakes late, or that the
// machine has no core for, costs nothing but its help. A second caller at the same time runs alone. A child after a fork
// starts a pool of its own, because threads don't survive one.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
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
    using Part = void (*)(const void* body, int64_t part, int thread);

    // Call call(body, part, thread) for every part of [0, parts) on up to `threads` threads; the caller's is thread 0.
    void run(int threads, int64_t parts, Part call, const void* body) {
        if (is_taken_.exchange(true, std::memory_order_acquire)) {
            for (int64_t part = 0; part < parts; ++part) call(body, part, 0);
            return;
        }
        grow(threads);
        call_ = call, body_ = body;
        undone_.store(parts, std::memory_order_relaxed);
        offer_.store(int64_t{threads} << 32 | parts);  // from here on workers take parts
        if (sleepers_.load() > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        while (take(0)) {
        }
        for (int turn = 0; undone_.load(std::memory_order_acquire) > 0; ++turn) {
            if (turn < kSpins)
                pause_core();
            else
                std::this_thread::yield();
        }
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
#define Q4_CPU_SPINS 2000
#endif
    static constexpr int kSpins = Q4_CPU_SPINS;

    static bool is_for(int64_t offer, int thread) { return (offer & 0xffffffff) != 0 && thread < offer >> 32; }

    // A part is taken by whoever lowers the offer. Who gets none must not look at the job: it may be over.
    bool take(int thread) {
        int64_t offer = offer_.load(std::memory_order_acquire);
        do {
            if (!is_for(offer, thread)) return false;
        } while (!offer_.compare_exchange_weak(offer, offer - 1, std::memory_order_acq_rel, std::memory_order_acquire));
        call_(body_, (offer & 0xffffffff) - 1, thread);
        undone_.fetch_sub(1, std::memory_order_release);
        return true;
    }

    void work(int thread) {
        for (;;) {
            for (int turn = 0; turn < kSpins; ++turn, pause_core())
                while (take(thread)) turn = 0;
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, [&] { return is_for(offer_.load(), thread); });
            sleepers_.fetch_sub(1);
        }
    }

    void grow(int threads) {
        try {
            for (; count_ < threads; ++count_) std::thread(&Pool::work, this, count_).detach();
        } catch (const std::exception&) {  // as many as the machine gives
        }
    }

    static inline std::atomic<Pool*> g_pool{nullptr};
    std::atomic<bool> is_taken_{false};
    int count_ = 1;  // the caller
    Part call_ = nullptr;
    const void* body_ = nullptr;
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<int64_t> offer_{0};  // threads that may take part << 32 | parts that nobody has taken
    alignas(64) std::atomic<int64_t> undone_{0};
    alignas(64) std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace q4
