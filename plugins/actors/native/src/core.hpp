// What one process holds of a segment. The GIL guards all of it.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cstring>
#include <cxxabi.h>
#include <utility>
#include <vector>

#include "cells.hpp"

namespace q4 {

namespace nb = nanobind;

constexpr int64_t kCopiedHere = 1 << 16;  // bytes; larger contents are copied by torch, without the GIL
enum Obstacle { kTaken = -1, kInUse = -2, kLook = -3, kCut = -4, kReadersFirst = -5 };

class View;

inline PyObject* checked(PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return object;
}

// Run what may take or give up the GIL. Until 3.13 CPython unwinds a daemon thread by force that comes for the GIL after
// the interpreter has ended, and no frame of nanobind's lets that through. Such a thread stays here until its process is
// gone, as it does from 3.14 on. Nothing in ``action`` may have a destructor: they would run without the GIL.
template <class Action>
auto while_it_runs(Action action) {
    try {
        return action();
    } catch (abi::__forced_unwind&) {
        for (;;) pause();  // to leave this handler would end the process
    }
}

// What is asked of objects of Python's.
struct Names {
    PyObject* base = PyUnicode_InternFromString("base");
    PyObject* detach = PyUnicode_InternFromString("detach");
    PyObject* enter = PyUnicode_InternFromString("__enter__");
    PyObject* exit = PyUnicode_InternFromString("__exit__");
    PyObject* gate = PyUnicode_InternFromString("gate");
    PyObject* has_writer = PyUnicode_InternFromString("has_writer");
    PyObject* pass_turn = PyUnicode_InternFromString("pass_turn");
    PyObject* poll = PyUnicode_InternFromString("poll");
    PyObject* raise_again = PyUnicode_InternFromString("raise_again");
    PyObject* raise_external_write = PyUnicode_InternFromString("raise_external_write");
    PyObject* raise_late = PyUnicode_InternFromString("raise_late");
    PyObject* raise_outside = PyUnicode_InternFromString("raise_outside");
    PyObject* read_in_turn = PyUnicode_InternFromString("read_in_turn");
    PyObject* release = PyUnicode_InternFromString("release");
    PyObject* tensor = PyUnicode_InternFromString("tensor");
    PyObject* thread = PyUnicode_InternFromString("thread");
    PyObject* version = PyUnicode_InternFromString("version");
    PyObject* changes = PyUnicode_InternFromString("_version");
};

inline const Names& names() {
    static const Names all;
    return all;
}

inline nb::object attribute(nb::handle of, PyObject* name) {
    return nb::steal(checked(while_it_runs([&] { return PyObject_GetAttr(of.ptr(), name); })));
}

// Call a method.
template <class... Arguments>
nb::object ask(nb::handle of, PyObject* name, const Arguments&... arguments) {
    PyObject* const all[] = {of.ptr(), arguments.ptr()...};
    constexpr size_t count = 1 + sizeof...(Arguments);
    return nb::steal(checked(while_it_runs([&] { return PyObject_VectorcallMethod(name, all, count, nullptr); })));
}

// Torch's count of in-place changes, which a tensor's aliases share.
inline int64_t changes_of(const nb::object& tensor) { return nb::cast<int64_t>(attribute(tensor, names().changes)); }

// What one process holds of a segment.
class Core {
  public:
    Core(const nb::object& memory, const nb::list& slots, nb::object here, int64_t content_bytes, int file)
        : is_in_place(nb::len(slots) == 1), file(file), here_(std::move(here)), content_bytes_(content_bytes), cells_(nullptr, 0) {
        if (PyObject_GetBuffer(memory.ptr(), &buffer_, PyBUF_WRITABLE) != 0) throw nb::python_error();
        for (nb::handle slot : slots) slots_.push_back({nb::borrow(slot), -1, 0, 0});
        cells_ = Cells(static_cast<char*>(buffer_.buf), static_cast<int>(slots_.size()));
    }
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;
    ~Core() { close(); }

    void close() {
        if (is_closed_) return;
        const bool is_there = is_whole();
        is_closed_ = is_shut = true;
        put_all_out();
        if (is_there) cells_.leave();
        slots_.clear();
        release();
    }

    // Whether the file still has all that is mapped; a look at what was cut off would end the process.
    bool is_whole() const { return is_closed_ || file < 0 || lseek(file, 0, SEEK_END) >= buffer_.len; }

    void wait(int64_t known, double seconds) { wait_for(kCurrent, kAwaited, known, seconds); }

    void wait_turn(double seconds) {
        const int64_t known = checked_cells().turn();
        if (known != 0) wait_for(kTurn, kTurnAwaited, known, seconds);
    }

    // Sleep until the bar is gone, or for so long.
    void wait_bar(double seconds) {
        const int64_t known = checked_cells().word(kBarred);
        if (known != 0) wait_for(kBarred, kBarAwaited, known, seconds);
    }

    // Sleep until a reader has cleared such a bit, or for so long.
    void wait_for_bit(uint64_t bit, double seconds) {
        const int64_t known = checked_cells().word(kMoves);
        cells_.set(kMovesAwaited, 1);  // before the look: who clears a bit looks for this afterwards
        fence();
        if (cells_.is_any(bit)) wait_for(kMoves, kMovesAwaited, known, seconds);
    }

    void enter(int row) { checked_cells().enter(row); }
    void put_all_out();
    void after_fork();
    bool is_reading(nb::handle thread) const;
    int reclaim();
    int open() const { return open_; }
    Cells& cells() { return cells_; }
    Cells& checked_cells() {
        if (is_closed_) throw nb::value_error("the segment must be open");
        return cells_;
    }
    nb::object thread() const { return attribute(here_, names().thread); }

    // -- writing

    // Take the turn and what an update needs, and return its slot, or what is in the way.
    int begin(bool copies, bool heals, bool yields, int64_t process) {
        if (!is_whole()) return kCut;
        if (!checked_cells().try_turn()) return kTaken;
        const int64_t word = cells_.word(kCurrent), version = word >> 8;
        const auto current = static_cast<size_t>(is_in_place ? 0 : word & 255);
        const bool is_poisoned = is_in_place ? (word & 255) != kHealthy : cells_.word(kTainted) == version + 1;
        if (is_shut || cells_.word(kClosed) || is_poisoned != heals || version >= kMaxVersion) return kLook;
        if (!heals) {
            if (!is_untouched(current, version)) return kLook;
            cells_.set(kWriterProcess, process);  // while it is healed, the process that died stays named
        }
        if (is_in_place) {
            if (yields && cells_.is_readers_turn()) return kReadersFirst;
            if (!cells_.claim()) return kInUse;
            if (cells_.word(kCurrent) != word) return kLook;  // whoever read until now may have changed it
            if (!heals) mark();
            return 0;
        }
        const int slot = cells_.free_slot();
        if (slot < 0) return kInUse;
        if (copies && content_bytes_ <= kCopiedHere) {
            std::memcpy(data(static_cast<size_t>(slot)), data(current), static_cast<size_t>(content_bytes_));
            if (!is_untouched(current, version)) return kLook;
        }
        return slot;
    }

    // Say that the content is being written, before the first store to it.
    void mark() {
        checked_cells().declare(kWriting);
        is_marked = true;
    }

    // Take that back, if nothing was written.
    void unmark() {
        if (!is_marked) return;
        is_marked = false;
        const auto& cells = checked_cells();
        if (cells.has_turn() && (cells.word(kCurrent) & 255) == kWriting) cells_.declare(kHealthy);
    }

    void end_turn() {
        is_marked = false;
        checked_cells().end_turn();
    }

    bool copies_here() const { return content_bytes_ <= kCopiedHere; }

    // Publish the slot and give back the turn, unless somebody has closed it, or poisoned it meanwhile.
    int64_t end(int slot, bool heals) {
        const auto& cells = checked_cells();
        const int64_t word = cells.word(kCurrent), version = (word >> 8) + 1;
        const bool is_well = is_in_place ? is_marked && (word & 255) == kWriting : cells.word(kTainted) != version;
        if (!cells.has_turn() || cells.word(kClosed) || !(heals || is_well)) return kLook;
        note(slot, version);
        cells_.publish(version, slot);
        end_turn();
        return version;
    }

    void note(int slot, int64_t version) {
        auto& own = slots_.at(static_cast<size_t>(slot));
        own.version = version, own.changes = changes_of(own.tensor);
    }

    // Whether no aliases of this process have changed this version since it was first seen here.
    bool is_untouched(size_t slot, int64_t version) {
        auto& own = slots_.at(slot);
        const int64_t changes = changes_of(own.tensor);
        if (own.version != version) own.version = version, own.changes = changes;
        return own.changes == changes;
    }

    // -- reading

    struct Slot {
        nb::object tensor;
        int64_t version;
        int64_t changes;
        int readers;
    };
    Slot& slot(int index) { return slots_[static_cast<size_t>(index)]; }

    // Hold the one slot for a thread; one that reads already may always read once more.
    bool hold_fast() {
        if (slots_[0].readers == 0 && !is_held) return cells_.hold_unless_barred();
        return cells_.word(kBarred) == 0;
    }

    // The same for blocks that the caller counts, all of them as one.
    bool hold_in_turn(bool again) {
        checked_cells();
        const bool is_in = again || hold_fast();
        is_held = is_held || is_in;
        return is_in;
    }

    void let_go() {
        if (is_closed_ || !is_held) return;
        is_held = false;
        if (slots_[0].readers == 0) cells_.leave_slot();
    }

    bool is_holding() { return !is_closed_ && (is_held || slots_[0].readers > 0); }

    void link(View& view);
    void unlink(View& view, bool is_there = true);
    int64_t reads = 0;
    bool is_shut = false;
    const bool is_in_place;
    int file;  // what is mapped, open once more
    bool is_held = false;  // by blocks that the caller counts
    bool is_marked = false;  // by this process's update

  private:
    // Sleep until there is another word, while other threads may close.
    void wait_for(Word which, Word awaited, int64_t known, double seconds) {
        auto& cells = checked_cells();
        ++waiting_;
        PyThreadState* const here = PyEval_SaveThread();
        cells.await(which, awaited, known, seconds);
        while_it_runs([&] { PyEval_RestoreThread(here); });
        --waiting_;
        if (is_closed_) release();
    }

    void release() {
        if (waiting_ == 0 && buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
    }

    void* data(size_t slot) const {
        const int64_t stride = (content_bytes_ + kPage - 1) / kPage * kPage;
        return static_cast<char*>(buffer_.buf) + kPage + kRows * kRowBytes + stride * static_cast<int64_t>(slot);
    }

    nb::object here_;
    int64_t content_bytes_;
    Py_buffer buffer_{};
    Cells cells_;
    std::vector<Slot> slots_;
    View* first_ = nullptr;  // of the views inside their block
    int open_ = 0, waiting_ = 0;
    bool is_closed_ = false;
};

}  // namespace q4
