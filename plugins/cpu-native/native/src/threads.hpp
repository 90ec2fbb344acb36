// Threads of the OpenMP runtime that torch uses too, so that the two never fight; one thread after a fork, because that
// runtime's workers do not survive one and waiting for them would hang.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

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
#ifndef Q4_CPU_PARTS
#define Q4_CPU_PARTS 4
#endif

inline int team_size(int64_t count, int threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(std::min(threads, kMostThreads), count)));
}

// Call body(from, to, thread) over parts of [0, count); thread < team_size. The body must not throw.
template <class Body> void parallel(int64_t count, int threads, const Body& body) {
    threads = team_size(count, threads);
    if (threads == 1) {
        body(0, count, 0);
        return;
    }
#ifdef Q4_CPU_POOL
    struct Job {
        const Body& body;
        int64_t count, parts;
    } job{body, count, std::min<int64_t>(int64_t{threads} * Q4_CPU_PARTS, count)};
    Pool::here().run(threads, job.parts, [](const void* given, int64_t part, int thread) {
        const Job& it = *static_cast<const Job*>(given);
        it.body(it.count * part / it.parts, it.count * (part + 1) / it.parts, thread);
    }, &job);
#else
    if (g_is_forked.load(std::memory_order_relaxed) || omp_in_parallel()) {
        body(0, count, 0);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        body(count * me / team, count * (me + 1) / team, static_cast<int>(me));
    }
#endif
}

}  // namespace q4
