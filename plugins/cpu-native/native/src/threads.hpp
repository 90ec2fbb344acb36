// Threads of the OpenMP runtime that torch uses too, so that the two never fight; one thread after a fork, because that
// runtime's workers do not survive one and waiting for them would hang.
#pragma once

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace q4 {

inline std::atomic<bool> g_is_forked{false};

inline void watch_forks() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { g_is_forked.store(true); });
    (void)once;
}

// Call body(from, to, thread) over [0, count), in as many equal parts as threads.
template <class Body> void parallel(int64_t count, int threads, const Body& body) {
    threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, count)));
    if (threads == 1 || g_is_forked.load(std::memory_order_relaxed) || omp_in_parallel()) {
        body(0, count, 0);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        body(count * me / team, count * (me + 1) / team, static_cast<int>(me));
    }
}

}  // namespace q4
