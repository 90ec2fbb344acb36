// Threads of the OpenMP runtime that torch uses too, so that the two never fight; one thread after a fork, because that
// runtime's workers do not survive one and waiting for them would hang.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "patience.hpp"

#ifdef Q4_CPU_POOL
#include "pool.hpp"
#else
#include <omp.h>
#endif

namespace q4 {

inline std::atomic<bool> g_is_forked{false};

inline void watch_forks() {
    static const int once = pthread_atfork(nullptr, nullptr, [] {
        g_is_forked.store(true);
#ifdef Q4_CPU_POOL
        Pool::forget();
#endif
    });
    (void)once;
}

constexpr int kMostThreads = 1024;  // more would be refused by the system, which OpenMP answers by ending the process

// How many threads `parallel` uses at most.
inline int team_size(int64_t count, int threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(std::min(threads, kMostThreads), count)));
}

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline Patience g_patience;

// Call body(from, to, thread) over [0, count), in as many equal parts as threads. The body must not throw.
template <class Body> void parallel(int64_t count, int threads, const Body& body) {
    threads = team_size(count, threads);
#ifdef Q4_CPU_POOL
    if (threads == 1) {
        body(0, count, 0);
        return;
    }
    struct Job {
        const Body& body;
        int64_t count, parts;
    } job{body, count, threads};
    Pool::here().run(threads, [](const void* given, int part) {
        const Job& it = *static_cast<const Job*>(given);
        it.body(it.count * part / it.parts, it.count * (part + 1) / it.parts, part);
    }, &job);
#else
    if (threads == 1 || g_is_forked.load(std::memory_order_relaxed) || omp_in_parallel()) {
        body(0, count, 0);
        return;
    }
    const int64_t start = now_ns();
    if (g_patience.is_alone(start)) {
        body(0, count, 0);
        return;
    }
    int64_t done = start;
#pragma omp parallel num_threads(threads)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        body(count * me / team, count * (me + 1) / team, static_cast<int>(me));
        if (me == 0) done = now_ns();
    }
    g_patience.judge(start, done, now_ns());
#endif
}

}  // namespace q4
