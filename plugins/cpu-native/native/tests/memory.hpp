// Buffers whose surroundings are watched: by bytes that must stay as they are, or by pages that may not be touched.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace q4test {

class Memory {
  public:
    explicit Memory(bool is_guarded) : is_guarded_(is_guarded), page_(sysconf(_SC_PAGESIZE)) {}
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() {
        for (const Slot& slot : slots_) munmap(slot.start - page_, static_cast<size_t>(slot.bytes + 2 * page_));
    }

    // Bytes that start `shift` after an aligned address; where pages guard them, they end (or start) at one instead.
    uint8_t* take(int64_t bytes, int64_t shift = 0, bool at_start = false) {
        Block block{nullptr, bytes, kWatched, kWatched};
        if (is_guarded_) {
            const Slot& slot = slot_for(bytes);
            block.data = at_start ? slot.start : slot.start + slot.bytes - bytes;
            (at_start ? block.before : block.after) = 0;
        } else {
            heap_.emplace_back(new uint8_t[static_cast<size_t>(bytes + shift + 2 * kWatched)]);
            block.data = heap_.back().get() + kWatched + shift;
        }
        std::memset(block.data - block.before, kMark, static_cast<size_t>(block.before + bytes + block.after));
        blocks_.push_back(block);
        return block.data;
    }

    // Whether nothing was written around any buffer.
    bool is_untouched() const {
        for (const Block& block : blocks_) {
            for (int64_t i = 1; i <= block.before; ++i)
                if (block.data[-i] != kMark) return false;
            for (int64_t i = 0; i < block.after; ++i)
                if (block.data[block.bytes + i] != kMark) return false;
        }
        return true;
    }

    void clear() {
        blocks_.clear();
        heap_.clear();
    }

  private:
    static constexpr int64_t kWatched = 64;
    static constexpr uint8_t kMark = 0xc5;
    struct Block {
        uint8_t* data;
        int64_t bytes, before, after;
    };
    struct Slot {
        uint8_t* start;
        int64_t bytes;
    };

    // The mapping of the n-th buffer of a case, reused from case to case because mapping is slow.
    const Slot& slot_for(int64_t bytes) {
        const size_t index = blocks_.size();
        const int64_t wanted = (bytes + kWatched + page_ - 1) / page_ * page_;
        if (index == slots_.size()) slots_.push_back({nullptr, 0});
        Slot& slot = slots_[index];
        if (slot.bytes < wanted) {
            if (slot.start) munmap(slot.start - page_, static_cast<size_t>(slot.bytes + 2 * page_));
            void* all = mmap(nullptr, static_cast<size_t>(wanted + 2 * page_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (all == MAP_FAILED) throw std::bad_alloc();
            slot = {static_cast<uint8_t*>(all) + page_, wanted};
            if (mprotect(slot.start, static_cast<size_t>(wanted), PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
        }
        return slot;
    }

    bool is_guarded_;
    int64_t page_;
    std::vector<Block> blocks_;
    std::vector<Slot> slots_;
    std::vector<std::unique_ptr<uint8_t[]>> heap_;
};

}  // namespace q4test
