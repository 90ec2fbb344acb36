// The block in which a thread reads, and what a process does with all of its blocks. The GIL guards all of it.
#pragma once

#include "core.hpp"

namespace q4 {

// What ``read()`` gives.
class View {
  public:
    View(nb::object content, nb::object owner, Core& core, nb::object timeout)
        : content_(std::move(content)), owner_(std::move(owner)), core_(core), timeout_(std::move(timeout)) {}
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() {
        if (stage_ == kInside) core_.unlink(*this, core_.is_whole());
    }

    void enter() {
        if (stage_ != kNew) ask(content_, names().raise_again);
        stage_ = kLeft;
        thread_ = core_.thread();
        if (core_.is_in_place) {
            if (!enter_at_once()) enter_in_turn();
            return;
        }
        for (;;) {
            if (core_.is_shut || !core_.cells().is_own() || !core_.is_whole()) look();
            take();
            const auto& cells = core_.cells();
            if (cells.word(kClosed) || cells.word(kTainted) == version_ + 1) {
                leave();
                look();  // raises, unless somebody has reset it meanwhile
                continue;
            }
            if (!core_.is_untouched(static_cast<size_t>(slot_), version_)) leave_after_a_change(true);
            changes_ = core_.slot(slot_).changes;
            return;
        }
    }

    void exit(nb::handle error) {
        alias_.reset();
        if (stage_ == kInside) {
            ++core_.reads;
            if (changes_of(core_.slot(slot_).tensor) == changes_) {
                leave();
            } else {
                leave_after_a_change(error.is_none());
            }
            if (core_.open() == 0) {
                if (core_.is_shut) ask(content_, names().release);
                if (core_.is_in_place && is_somebody_writing()) ask(content_, names().pass_turn);
            }
        } else if (stage_ == kInTurn) {
            stage_ = kLeft;
            ++core_.reads;
            ask(turn_, names().exit, nb::none(), error, nb::none());
        } else if (stage_ == kPutOut) {
            stage_ = kLeft;
            ask(content_, names().raise_late, error);
        }
    }

    nb::object tensor() {
        if (!alias_.is_valid()) {
            if (stage_ == kInTurn) return attribute(turn_, names().tensor);
            if (stage_ != kInside) ask(content_, names().raise_outside, nb::handle(names().tensor));
            alias_ = ask(base(), names().detach);
        }
        return alias_;
    }

    nb::object base() const {
        if (stage_ == kInTurn) return attribute(turn_, names().base);
        if (stage_ != kInside) throw nb::attribute_error("base");
        return core_.slot(slot_).tensor;
    }
    int64_t version() const {
        if (version_ < 0) ask(content_, names().raise_outside, nb::handle(names().version));
        return version_;
    }

    void put_out() { stage_ = kPutOut; }
    bool is_of(nb::handle thread) const { return thread_.is(thread); }
    bool is_abandoned() const { return nb::steal(PyObject_CallNoArgs(thread_.ptr())).is_none(); }

    View *before = nullptr, *after = nullptr;
    int slot_ = -1;

  private:
    enum Stage { kNew, kInside, kInTurn, kPutOut, kLeft };

    bool is_somebody_writing() const { return nb::cast<bool>(attribute(attribute(content_, names().gate), names().has_writer)); }

    // Where there is one slot: take it, if nobody writes or waits to, and there is nothing to complain about.
    bool enter_at_once() {
        if (core_.is_shut || !core_.cells().is_own() || !core_.is_whole()) return false;
        if (!core_.is_reading(thread_) && (is_somebody_writing() || !core_.hold_fast())) return false;
        slot_ = 0;
        core_.link(*this);
        stage_ = kInside;
        const auto& cells = core_.cells();
        const int64_t word = cells.word(kCurrent);
        if ((word & 255) != kHealthy || cells.word(kClosed)) {
            leave();
            return false;
        }
        version_ = word >> 8;
        if (!core_.is_untouched(0, version_)) leave_after_a_change(true);
        changes_ = core_.slot(0).changes;
        return true;
    }

    // Wait among the threads of this process, then among the processes; raises the reason if it can't.
    void enter_in_turn() {
        turn_ = ask(content_, names().read_in_turn, timeout_);
        ask(turn_, names().enter);
        version_ = nb::cast<int64_t>(attribute(turn_, names().version));
        stage_ = kInTurn;
    }

    void look() {
        ask(content_, names().poll);
        if (core_.is_shut || !core_.cells().is_own()) throw nb::value_error("it is closed");
    }

    void take() {
        auto& cells = core_.cells();
        int64_t word;
        do {  // begins anew only after another version was published
            word = cells.word(kCurrent);
            slot_ = static_cast<int>(word & 255);
            // Where this process reads already, nobody can have begun to write.
            if (core_.slot(slot_).readers == 0) word = cells.hold(slot_);
        } while (word < 0);
        version_ = word >> 8;
        core_.link(*this);
        stage_ = kInside;
    }

    void leave() {
        if (stage_ == kInside) core_.unlink(*this);  // else it was evicted meanwhile
        stage_ = kLeft;
    }

    // It is reported while the slot is still held, so that the report is of this version.
    void leave_after_a_change(bool raises) {
        try {
            ask(content_, names().raise_external_write, nb::object(core_.slot(slot_).tensor), nb::cast(version_));
        } catch (nb::python_error&) {
            leave();
            if (raises) throw;
            return;
        }
        leave();
    }

    nb::object content_, owner_;
    Core& core_;
    nb::object timeout_, thread_, alias_, turn_;
    int64_t version_ = -1, changes_ = 0;
    Stage stage_ = kNew;
};

inline void Core::link(View& view) {
    view.before = nullptr, view.after = first_;
    if (first_ != nullptr) first_->before = &view;
    first_ = &view;
    ++open_, ++slot(view.slot_).readers;
}

inline void Core::unlink(View& view, bool is_there) {
    (view.before != nullptr ? view.before->after : first_) = view.after;
    if (view.after != nullptr) view.after->before = view.before;
    --open_;
    if (--slot(view.slot_).readers != 0 || !is_there) return;
    if (!is_in_place) {
        cells_.let_go(view.slot_);
    } else if (!is_held) {
        cells_.leave_slot();
    }
}

inline void Core::put_all_out() {
    for (View* view = first_; view != nullptr; view = view->after) view->put_out();
    first_ = nullptr, open_ = 0;
}

// In a child nobody is inside: what the parent's threads hold is the parent's.
inline void Core::after_fork() {
    put_all_out();
    for (auto& slot : slots_) slot.readers = 0, slot.version = -1;
    reads = waiting_ = 0;
    is_held = is_marked = false;
    cells_.leave();
}

inline bool Core::is_reading(nb::handle thread) const {
    for (const View* view = first_; view != nullptr; view = view->after) {
        if (view->is_of(thread)) return true;
    }
    return false;
}

// Evict readers whose thread has ended.
inline int Core::reclaim() {
    int count = 0;
    const bool is_there = is_whole();
    for (View *view = first_, *next; view != nullptr; view = next) {
        next = view->after;
        if (view->is_abandoned()) {
            unlink(*view, is_there);
            view->put_out();
            ++count;
        }
    }
    return count;
}

}  // namespace q4
