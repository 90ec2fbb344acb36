// Threads of the OpenMP runtime that torch uses too, so that the two never fight; one thread after a fork, because that
// runtime's workers do not survive one and waiting for them would hang.
//
// With Q4_CPU_STD_THREADS, threads that live as long as one call: for thread sanitizers, which can't see into OpenMP's.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "float_mode.hpp"
#include "patience.hpp"

#ifdef Q4_CPU_STD_THREADS
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace q4 {

inline std::atomic<int32_t> g_forks{0};  // this process and its parents

inline void watch_forks() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
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

#ifdef Q4_CPU_STD_THREADS
inline bool is_in_team() { return false; }

// Call work(thread, team) once for each thread of a team.
template <class Work> void run_team(int threads, const Work& work) {
    struct Team : std::vector<std::thread> {
        ~Team() {
            for (std::thread& thread : *this) thread.join();
        }
    } team;
    team.reserve(static_cast<size_t>(threads));
    for (int me = 1; me < threads; ++me) team.emplace_back([&work, me, threads] { work(me, threads); });
    work(0, threads);
}
#else
inline bool is_in_team() { return omp_in_parallel() != 0; }

template <class Work> void run_team(int threads, const Work& work) {
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num(), omp_get_num_threads());
}
#endif

// Whether work may be shared among threads now.
inline bool may_share(int threads) {
    return threads > 1 && g_forks.load(std::memory_order_relaxed) == 0 && !is_in_team();
}

// Call body(from, to, thread) over [0, count), in as many equal parts as threads, each in the plain floating-point mode. The
// body must not throw.
template <class Body> void parallel(int64_t count, int threads, const Body& body) {
    threads = team_size(count, threads);
    const bool shares = may_share(threads);
    const int64_t start = shares ? now_ns() : 0;
    if (!shares || g_patience.is_alone(start)) {
        const FloatMode plain;
        body(0, count, 0);
        return;
    }
    int64_t done = start;
    run_team(threads, [&](int64_t me, int64_t team) {
        const FloatMode plain;
        body(count * me / team, count * (me + 1) / team, static_cast<int>(me));
        if (me == 0) done = now_ns();
    });
    g_patience.judge(start, done, now_ns());
}

}  // namespace q4
