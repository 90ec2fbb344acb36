// The protocol between processes by atomics alone; docs/memory-protocols.md argues it, and tests/protocols searches it.
//
// One 64-bit word names the newest version and its slot. Each process has a row, with one bit for each slot that it reads.
// A reader sets its bit and then looks at the word again; a writer, whose turn it is, writes only where no bit is set. Between
// its store and its look each has a full fence, so at least one of the two sees the other. Where there is one slot only, a
// writer whose turn it is sets a bar, and writes once no bit is set; a reader sets its bit and then looks for the bar.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace q4 {

constexpr int kPage = 4096;
constexpr int kRows = 256;
constexpr int kRowBytes = 64;
constexpr int64_t kMaxVersion = (int64_t{1} << 55) - 1;

// Which 64-bit word of the header is what; q4_actors/segment.py has the same numbers.
enum Word {
    kCurrent = 64, kClosed = 72, kTainted = 73, kBarred = 80, kBarAwaited = 81, kMoves = 88, kMovesAwaited = 89, kUnbarredAt = 90, kWriterProcess = 96,
    kTurn = 104, kRowsUsed = 112, kTokens = 113, kAwaited = 120, kTurnAwaited = 121
};
// In one word with the version, where there is one slot.
enum State { kHealthy = 0, kWriting = 1, kPoisoned = 2 };
// The bits of a row, where there is one slot.
constexpr uint64_t kReads = 1, kKeptOut = 2;
// How long after the end of an update the readers that it blocked may go first.
constexpr int64_t kReadersTurnNs = 1'200'000;

inline int64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

// Reads and writes of words that other processes change too.
template <class T> T load(const T& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
template <class T> void store(T& word, T value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }
inline void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline bool exchange(int64_t& word, int64_t expected, int64_t value) {
    return __atomic_compare_exchange_n(&word, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// Counts forks on the child's side, so that a child never takes its parent's row for its own.
inline unsigned& forks() {
    static unsigned count = [] {
        pthread_atfork(nullptr, nullptr, [] { ++forks(); });
        return 0u;
    }();
    return count;
}

// What a process holds, on a cache line of its own. Only its process writes it; after its death, whoever has its lock.
struct Row {
    uint64_t slots;  // one bit for each slot that is read
    int64_t token;  // of the process, never used again; 0: nobody's
    int64_t unused[kRowBytes / 8 - 2];
};

class Cells {
  public:
    Cells(char* memory, int slots) : words_(reinterpret_cast<int64_t*>(memory)), slots_(slots) {
        rows_ = reinterpret_cast<Row*>(memory + kPage);
    }

    int64_t word(Word which) const { return load(words_[which]); }
    void set(Word which, int64_t value) { store(words_[which], value); }
    int64_t turn() const { return load(words_[kTurn]); }
    int64_t token(int row) const { return load(rows_[row].token); }
    int row() const { return row_; }
    bool is_own() const { return row_ >= 0 && forks_ == forks(); }

    // Make a row this process's; the caller has its lock, which proves that nobody else has it.
    void enter(int row) {
        const int64_t token = __atomic_add_fetch(&words_[kTokens], 1, __ATOMIC_SEQ_CST);
        clear(row);
        store(rows_[row].token, token);
        int64_t used = word(kRowsUsed);
        while (used <= row && !exchange(words_[kRowsUsed], used, row + 1)) used = word(kRowsUsed);
        fence();
        row_ = row;
        mine_ = token * kRows + row;
        forks_ = forks();
    }

    void leave() {
        if (is_own()) clear(row_);
        row_ = -1;
    }

    // Give back what a dead process held; the caller has its lock.
    void clear(int row) {
        store(rows_[row].slots, uint64_t{0});
        store(rows_[row].token, int64_t{0});
    }

    bool reads(int row) const { return load(rows_[row].slots) != 0; }

    // Hold a slot that this process does not hold, and return the word, if it still names that slot; else return −1.
    int64_t hold(int slot) {
        __atomic_fetch_or(&rows_[row_].slots, uint64_t{1} << slot, __ATOMIC_SEQ_CST);
        fence();
        const int64_t now = word(kCurrent);
        if ((now & 255) == slot) return now;
        let_go(slot);  // a later version may be under way there
        return -1;
    }

    void let_go(int slot) {
        if (is_own()) __atomic_fetch_and(&rows_[row_].slots, ~(uint64_t{1} << slot), __ATOMIC_RELEASE);
    }

    bool try_turn() { return is_own() && (exchange(words_[kTurn], 0, mine_) || turn() == mine_); }

    // Take the turn from a process that is known to have ended.
    bool inherit_turn(int64_t from) { return is_own() && exchange(words_[kTurn], from, mine_); }

    bool has_turn() const { return is_own() && turn() == mine_; }

    void end_turn() {
        if (!has_turn()) return;
        unbar();
        exchange(words_[kTurn], mine_, 0);
        fence();
        if (word(kTurnAwaited)) wake(kTurn, kTurnAwaited);
    }

    // Return a slot that nobody reads, or −1. Whose turn it is calls this.
    int free_slot() const {
        fence();
        uint64_t held = uint64_t{1} << (word(kCurrent) & 255);
        const int64_t used = word(kRowsUsed);
        for (int64_t row = 0; row < used && row < kRows; ++row) held |= load(rows_[row].slots);
        for (int slot = 0; slot < slots_; ++slot) {
            if (!(held >> slot & 1)) return slot;
        }
        return -1;
    }

    void publish(int64_t version, int slot) {
        store(words_[kCurrent], version << 8 | slot);
        fence();
        if (word(kAwaited)) wake(kCurrent, kAwaited);
    }

    // -- one slot

    // Hold the slot, which this process does not hold, unless it is barred.
    bool hold_unless_barred() {
        __atomic_fetch_or(&rows_[row_].slots, kReads, __ATOMIC_SEQ_CST);
        fence();
        if (word(kBarred) == 0) return true;
        leave_slot();
        return false;
    }

    void leave_slot() {
        if (is_own()) drop(kReads);
    }

    // Record whether readers of this process are blocked, so that the next writer lets them go first.
    void say_kept_out(bool is_any) {
        if (!is_own()) return;
        if (is_any) {
            __atomic_fetch_or(&rows_[row_].slots, kKeptOut, __ATOMIC_SEQ_CST);
        } else {
            drop(kKeptOut);
        }
    }

    bool is_any(uint64_t bit) const {
        const int64_t used = word(kRowsUsed);
        for (int64_t row = 0; row < used && row < kRows; ++row) {
            if (load(rows_[row].slots) & bit) return true;
        }
        return false;
    }

    // Whether readers that were blocked may still go first; those that did not get to run in time go with the others.
    bool is_readers_turn() const { return is_any(kKeptOut) && now_ns() - word(kUnbarredAt) < kReadersTurnNs; }

    // Keep new readers out, and return whether none are left. Whose turn it is calls this.
    bool claim() {
        if (word(kBarred) != mine_) store(words_[kBarred], mine_);
        fence();
        return !is_any(kReads);
    }

    // End the turn of a process that is known to have ended.
    void bury(int64_t dead) {
        if (inherit_turn(dead)) end_turn();
    }

    // Change the state. Whoever finds the content changed, finds this, too.
    void declare(State state) {
        store(words_[kCurrent], (word(kCurrent) & ~int64_t{255}) | state);
        fence();
    }

    // Wake everybody who awaits another word. Whoever waits looks again by itself, too, should this process die before.
    void wake(Word which, Word awaited) {
        store(words_[awaited], int64_t{0});
        syscall(SYS_futex, half(which), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }

    // Sleep until the word is another than this, or for so long.
    void await(Word which, Word awaited, int64_t known, double seconds) {
        store(words_[awaited], int64_t{1});
        fence();
        if (word(which) != known) return;
        timespec time{};
        time.tv_sec = static_cast<time_t>(seconds);
        time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
        syscall(SYS_futex, half(which), FUTEX_WAIT, static_cast<uint32_t>(known), &time, nullptr, 0);
    }

  private:
    void unbar() {
        if (word(kBarred) == 0) return;
        store(words_[kUnbarredAt], now_ns());
        store(words_[kBarred], int64_t{0});
        fence();
        if (word(kBarAwaited)) wake(kBarred, kBarAwaited);
    }

    // Clear a bit, and wake a writer that waits for that.
    void drop(uint64_t bit) {
        __atomic_fetch_and(&rows_[row_].slots, ~bit, __ATOMIC_SEQ_CST);
        fence();
        if (word(kMovesAwaited)) {
            __atomic_add_fetch(&words_[kMoves], 1, __ATOMIC_SEQ_CST);
            wake(kMoves, kMovesAwaited);
        }
    }

    // Futexes have 32 bits: those that differ from version to version, and from turn to turn.
    uint32_t* half(Word which) const {
        auto* halves = reinterpret_cast<uint32_t*>(&words_[which]);
        return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
    }

    int64_t* words_;
    Row* rows_;
    int slots_;
    int row_ = -1;
    unsigned forks_ = 0;
    int64_t mine_ = 0;
};

static_assert(sizeof(Row) == kRowBytes, "a row has a cache line of its own");

}  // namespace q4
