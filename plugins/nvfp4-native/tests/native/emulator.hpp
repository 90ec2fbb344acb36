// What device.cuh asks of a GPU, computed on the CPU: each thread of a block is a fiber, a warp's common operations happen
// once all its lanes have come to them, and asynchronous copies arrive as late, or as early, as the ISA allows.
//
// Fragments are laid out by the tables of the PTX ISA for mma.m16n8k64 (restated in `multiply`), not by the kernels' own
// formulas: a kernel that puts a value into a wrong register computes a wrong number here.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

typedef std::uint8_t uint8;
typedef std::uint16_t uint16;
typedef std::uint32_t uint32;
typedef long long int64;

struct float4 {
    float x, y, z, w;
};
struct uint4 {
    uint32 x, y, z, w;
};

#define Q4_DEVICE inline
#define Q4_KERNEL extern "C"
#define Q4_UNROLL
#define __launch_bounds__(...)

namespace emulator {

enum Copies { LATE = 0, EARLY = 1 };

// How a run behaves where the hardware leaves it open; set from outside.
struct Manner {
    int copies = LATE;
    int is_backwards = 0;  // threads take turns from the last to the first
};
inline Manner manner;

[[noreturn]] inline void fail(const char* message) {
    std::fprintf(stderr, "emulator: %s\n", message);
    std::abort();
}

// What asynchronous copies may read, where a launch says it; and how often one read elsewhere.
struct Range {
    const uint8* start;
    int64 bytes;
};
inline thread_local std::vector<Range> readable;
inline std::atomic<int> violations{0};

constexpr int kStackBytes = 1 << 16;
constexpr int kGuardBytes = 256;
constexpr uint8 kPoison = 0xff;  // E2M1 -6, a NaN as E4M3, a NaN as float32

struct Copy {
    uint8* to;
    const uint8* from;
    int bytes;
    bool is_inside;
};

struct Warp {
    int arrived = 0;
    int turn = 0;
    const void* kind = nullptr;
    void* slots[32] = {};
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
    bool is_done = false;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<uint8> memory;
    uint8* shared = nullptr;
    int shared_bytes = 0;
    int index = 0;
    int at_barrier = 0;
    int turn = 0;
    bool any = false, any_before = false;
    int current = 0;
    ucontext_t scheduler;
    std::function<void()> body;
};
inline thread_local Block* block = nullptr;

inline void yield() { swapcontext(&block->threads[block->current].context, &block->scheduler); }

inline void check_shared(const uint8* address, int bytes) {
    const bool is_inside = address >= block->shared && address + bytes <= block->shared + block->shared_bytes;
    if (!is_inside) fail("an address lies outside of shared memory");
    if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) fail("an address of shared memory is not aligned");
}

// Runs `act(slots)` once all 32 lanes of the warp have come to the same operation.
template <typename Act>
void together(const void* kind, void* slot, Act act) {
    Warp& warp = block->warps[block->current / 32];
    if (warp.arrived == 0) warp.kind = kind;
    if (warp.kind != kind) fail("lanes of one warp are at different operations");
    warp.slots[block->current % 32] = slot;
    if (++warp.arrived == 32) {
        act(warp.slots);
        warp.arrived = 0;
        ++warp.turn;
        return;
    }
    for (const int turn = warp.turn; warp.turn == turn;) yield();
}

inline bool barrier(bool value) {
    block->any = block->any || value;
    if (++block->at_barrier == static_cast<int>(block->threads.size())) {
        block->at_barrier = 0;
        block->any_before = block->any;
        block->any = false;
        ++block->turn;
        return block->any_before;
    }
    for (const int turn = block->turn; block->turn == turn;) yield();
    return block->any_before;
}

inline bool is_readable(const uint8* from, int bytes) {
    for (const Range& range : readable)
        if (from >= range.start && from + bytes <= range.start + range.bytes) return true;
    return readable.empty();
}

inline void perform(const Copy& copy) {
    const bool is_legal = !copy.is_inside || is_readable(copy.from, copy.bytes);
    violations += is_legal ? 0 : 1;
    if (copy.is_inside && is_legal)
        std::memcpy(copy.to, copy.from, copy.bytes);
    else
        std::memset(copy.to, 0, copy.bytes);
}

inline void enter() {
    block->body();
    Thread& thread = block->threads[block->current];
    if (!thread.open.empty()) fail("a thread ended with copies that it had not committed");
    for (const auto& group : thread.groups)
        if (!group.empty()) fail("a thread ended with copies under way");
    thread.is_done = true;
    swapcontext(&thread.context, &block->scheduler);
}

// Runs all blocks of a kernel, one after the other.
template <typename Body>
void run(Body body, int64 blocks, int threads, int shared_bytes) {
    if (threads % 32 != 0 || threads > 1024 || blocks < 1) fail("a launch has an illegal shape");
    if (shared_bytes > 101376) fail("a launch wants more shared memory than sm_120 has");
    Block state;
    state.threads = std::vector<Thread>(threads);
    state.memory.resize(shared_bytes + 2 * kGuardBytes + 128);
    block = &state;
    state.body = body;
    for (int64 index = 0; index < blocks; ++index) {
        state.index = static_cast<int>(index);
        state.warps.assign(threads / 32, Warp());
        std::fill(state.memory.begin(), state.memory.end(), kPoison);
        const auto base = reinterpret_cast<std::uintptr_t>(state.memory.data()) + kGuardBytes;
        state.shared = reinterpret_cast<uint8*>((base + 127) / 128 * 128);
        state.shared_bytes = shared_bytes;
        for (Thread& thread : state.threads) {
            thread.is_done = false;
            thread.groups.clear();
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.get();
            thread.context.uc_stack.ss_size = kStackBytes;
            thread.context.uc_link = nullptr;
            makecontext(&thread.context, enter, 0);
        }
        int left = threads;
        for (long rounds = 0; left > 0; ++rounds) {
            if (rounds > 1000000) fail("threads wait for one another for ever");
            for (int turn = 0; turn < threads; ++turn) {
                const int number = manner.is_backwards ? threads - 1 - turn : turn;
                Thread& thread = state.threads[number];
                if (thread.is_done) continue;
                state.current = number;
                swapcontext(&state.scheduler, &thread.context);
                if (thread.is_done) --left;
            }
        }
        for (const uint8* byte = state.memory.data(); byte < state.shared; ++byte)
            if (*byte != kPoison) fail("something was written before shared memory");
        for (const uint8* byte = state.shared + shared_bytes; byte < state.memory.data() + state.memory.size(); ++byte)
            if (*byte != kPoison) fail("something was written past shared memory");
    }
    block = nullptr;
}

inline float value_of_e2m1(uint32 code) {
    static const float sizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8u ? -sizes[code & 7u] : sizes[code & 7u];
}
// Unsigned: the sign bit is no part of UE4M3.
inline double value_of_ue4m3(uint32 byte) {
    if ((byte & 0x7fu) == 0x7fu) return NAN;
    const int exponent = byte >> 3 & 15;
    return exponent == 0 ? std::ldexp(byte & 7u, -9) : std::ldexp(8.0 + (byte & 7u), exponent - 10);
}
inline double value_of_ue8m0(uint32 byte) { return byte == 255u ? NAN : std::ldexp(1.0, static_cast<int>(byte) - 127); }

struct Product {
    float (*sums)[4];
    const uint32 (*a)[4];
    const uint32 (*b)[2];
    uint32 scales_a, scales_b;
};

// D = (A · scales) (B · scales) + C for .m16n8k64 with E2M1 operands. The tables are those of the PTX ISA: for element i of
// a thread's fragment of A, row = groupID (i < 8 or 16 <= i < 24) or groupID + 8, column = threadID_in_group * 8 + i % 8,
// 32 further for i >= 16; of B, k = threadID_in_group * 8 + i % 8, 32 further for i >= 8, column = groupID.
inline void multiply(void* const* slots, int block_size, double (*value_of_scale)(uint32)) {
    double a[16][64], b[8][64];
    for (int lane = 0; lane < 32; ++lane) {
        const Product& own = *static_cast<Product*>(slots[lane]);
        const int group = lane >> 2, within = lane % 4;
        for (int i = 0; i < 32; ++i) {
            const int row = (i < 8) || (i >= 16 && i < 24) ? group : group + 8;
            const int column = within * 8 + (i & 7) + (i < 16 ? 0 : 32);
            a[row][column] = value_of_e2m1((*own.a)[i / 8] >> (4 * (i % 8)) & 15u);
        }
        for (int i = 0; i < 16; ++i) {
            const int k = within * 8 + (i & 7) + (i < 8 ? 0 : 32);
            b[group][k] = value_of_e2m1((*own.b)[i / 8] >> (4 * (i % 8)) & 15u);
        }
    }
    // Selectors {byte 0, thread 0}: of each group of four lanes, the first two give rows group and group + 8 of A's scales,
    // and the first gives those of column `group` of B. What the other lanes hold is not read.
    for (int group = 0; group < 8; ++group) {
        const uint32 low = static_cast<Product*>(slots[4 * group])->scales_a;
        const uint32 high = static_cast<Product*>(slots[4 * group + 1])->scales_a;
        const uint32 column = static_cast<Product*>(slots[4 * group])->scales_b;
        for (int k = 0; k < 64; ++k) {
            const int shift = 8 * (k / block_size);
            a[group][k] *= value_of_scale(low >> shift & 255u);
            a[group + 8][k] *= value_of_scale(high >> shift & 255u);
            b[group][k] *= value_of_scale(column >> shift & 255u);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        Product& own = *static_cast<Product*>(slots[lane]);
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
            double sum = (*own.sums)[i];
            for (int k = 0; k < 64; ++k) sum += a[row][k] * b[column][k];
            (*own.sums)[i] = static_cast<float>(sum);
        }
    }
}

template <typename To, typename From>
To cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace emulator

inline uint8* shared_bytes() { return emulator::block->shared; }
inline int thread_index() { return emulator::block->current; }
inline int block_index() { return emulator::block->index; }
inline int block_threads() { return static_cast<int>(emulator::block->threads.size()); }
inline void synchronize() { emulator::barrier(false); }
inline bool any_in_block(bool value) { return emulator::barrier(value); }
inline uint32 shuffle_xor(uint32 value, int lanes) {
    static const char kind = 0;
    uint32 pair[2] = {value, 0};
    emulator::together(&kind, pair, [&](void** slots) {
        for (int lane = 0; lane < 32; ++lane)
            static_cast<uint32*>(slots[lane])[1] = static_cast<uint32*>(slots[lane ^ lanes])[0];
    });
    return pair[1];
}

inline uint32 bits_of(float value) { return emulator::cast<uint32>(value); }
inline float float_of(uint32 bits) { return emulator::cast<float>(bits); }
inline float divide(float value, float divisor) { return value / divisor; }
inline float reciprocal(float value) { return 1.0f / value; }

inline float from_half(uint16 bits) { return static_cast<float>(emulator::cast<_Float16>(bits)); }
inline uint16 to_half(float value) { return emulator::cast<uint16>(static_cast<_Float16>(value)); }
inline uint16 to_bfloat16(float value) {
    const uint32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <int bytes>
void copy_async(uint8* to, const uint8* from, bool is_inside) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16, "what cp.async copies");
    emulator::check_shared(to, bytes);
    if (is_inside && reinterpret_cast<std::uintptr_t>(from) % bytes != 0) emulator::fail("a copy is not aligned");
    const emulator::Copy copy = {to, from, bytes, is_inside};
    if (emulator::manner.copies == emulator::EARLY)
        emulator::perform(copy);
    else
        emulator::block->threads[emulator::block->current].open.push_back(copy);
}
inline void commit_copies() {
    emulator::Thread& thread = emulator::block->threads[emulator::block->current];
    thread.groups.push_back(std::move(thread.open));
    thread.open.clear();
}
template <int pending>
void wait_for_copies() {
    emulator::Thread& thread = emulator::block->threads[emulator::block->current];
    while (static_cast<int>(thread.groups.size()) > pending) {
        for (const emulator::Copy& copy : thread.groups.front()) emulator::perform(copy);
        thread.groups.pop_front();
    }
}

inline void load_matrices(uint32 (&registers)[4], const uint8* row) {
    static const char kind = 0;
    struct Slot {
        uint32* registers;
        const uint8* row;
    } own = {registers, row};
    emulator::check_shared(row, 16);
    emulator::together(&kind, &own, [](void** slots) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                const Slot& source = *static_cast<Slot*>(slots[matrix * 8 + lane / 4]);
                std::memcpy(static_cast<Slot*>(slots[lane])->registers + matrix, source.row + lane % 4 * 4, 4);
            }
        }
    });
}

struct E4m3 {
    static constexpr int block = 16;
    static void multiply(float (&sums)[4], const uint32 (&a)[4], const uint32 (&b)[2], uint32 scales_a, uint32 scales_b) {
        static const char kind = 0;
        emulator::Product own = {&sums, &a, &b, scales_a, scales_b};
        emulator::together(&kind, &own,
                           [](void** slots) { emulator::multiply(slots, block, emulator::value_of_ue4m3); });
    }
};
struct E8m0 {
    static constexpr int block = 32;
    static void multiply(float (&sums)[4], const uint32 (&a)[4], const uint32 (&b)[2], uint32 scales_a, uint32 scales_b) {
        static const char kind = 0;
        emulator::Product own = {&sums, &a, &b, scales_a, scales_b};
        emulator::together(&kind, &own,
                           [](void** slots) { emulator::multiply(slots, block, emulator::value_of_ue8m0); });
    }
};
