// Threads of the OpenMP runtime that torch uses too, so that the two never fight; one thread after a fork, because that
// runtime's workers do not survive one and waiting for them would hang.
//
// With Q4_CPU_STD_THREADS, threads that live as long as one call: for thread sanitizers, which can't see into OpenMP's.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#ifdef Q4_CPU_STD_THREADS
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace q4 {

inline std::atomic<bool> g_is_forked{false};

inline void watch_forks() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { g_is_forked.store(true); });
    (void)once;
}

constexpr int kMostThreads = 1024;  // more would be refused by the system, which OpenMP answers by ending the process

// How many parts `parallel` makes at most.
inline int team_size(int64_t count, int threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(std::min(threads, kMostThreads), count)));
}

// Call body(from, to, thread) over [0, count), in as many equal parts as threads. The body must not throw.
template <class Body> void parallel(int64_t count, int threads, const Body& body) {
    threads = team_size(count, threads);
#ifdef Q4_CPU_STD_THREADS
    struct Team : std::vector<std::thread> {
        ~Team() {
            for (std::thread& thread : *this) thread.join();
        }
    } team;
    team.reserve(static_cast<size_t>(threads));
    for (int64_t me = 1; me < threads; ++me)
        team.emplace_back([&body, count, threads, me] {
            body(count * me / threads, count * (me + 1) / threads, static_cast<int>(me));
        });
    body(0, count / threads, 0);
#else
    if (threads == 1 || g_is_forked.load(std::memory_order_relaxed) || omp_in_parallel()) {
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
