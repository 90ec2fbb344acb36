// The Python face: what one process holds of a segment, and the block in which a thread reads. The GIL guards all of it.
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "cells.hpp"

namespace nb = nanobind;

namespace {

constexpr int64_t kCopiedHere = 1 << 16;  // bytes; larger contents are copied by torch, without the GIL
enum Obstacle { kTaken = -1, kFull = -2, kLook = -3, kCut = -4 };

class View;

PyObject* checked(PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return object;
}

// Torch's count of in-place changes, which a tensor's aliases share.
int64_t changes_of(const nb::object& tensor) {
    static PyObject* const name = PyUnicode_InternFromString("_version");
    return nb::cast<int64_t>(nb::steal(checked(PyObject_GetAttr(tensor.ptr(), name))));
}

// What one process holds of a segment.
class Core {
  public:
    Core(const nb::object& memory, const nb::list& slots, nb::object here, int64_t content_bytes, int file)
        : is_in_place(nb::len(slots) == 1), file(file), here_(std::move(here)), content_bytes_(content_bytes), cells_(nullptr, 0) {
        if (PyObject_GetBuffer(memory.ptr(), &buffer_, PyBUF_WRITABLE) != 0) throw nb::python_error();
        for (nb::handle slot : slots) slots_.push_back({nb::borrow(slot), -1, 0, 0});
        cells_ = q4::Cells(static_cast<char*>(buffer_.buf), static_cast<int>(slots_.size()));
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

    void wait(int64_t known, double seconds) { wait_for(q4::kCurrent, q4::kAwaited, known, seconds); }

    void wait_turn(double seconds) {
        const int64_t known = checked_cells().turn();
        if (known != 0) wait_for(q4::kTurn, q4::kTurnAwaited, known, seconds);
    }

    // Sleep until the bar is gone, or for so long.
    void wait_bar(double seconds) {
        const int64_t known = checked_cells().word(q4::kBarred);
        if (known != 0) wait_for(q4::kBarred, q4::kBarAwaited, known, seconds);
    }

    // Sleep until a reader has cleared such a bit, or for so long.
    void wait_for_bit(uint64_t bit, double seconds) {
        const int64_t known = checked_cells().word(q4::kMoves);
        cells_.set(q4::kMovesAwaited, 1);  // before the look: who clears a bit looks for this afterwards
        q4::fence();
        if (cells_.is_any(bit)) wait_for(q4::kMoves, q4::kMovesAwaited, known, seconds);
    }

    void enter(int row) { checked_cells().enter(row); }
    void put_all_out();
    void after_fork();
    bool is_reading(nb::handle thread) const;
    int reclaim();
    int open() const { return open_; }
    q4::Cells& cells() { return cells_; }
    q4::Cells& checked_cells() {
        if (is_closed_) throw nb::value_error("the segment must be open");
        return cells_;
    }
    nb::object thread() const {
        static PyObject* const name = PyUnicode_InternFromString("thread");
        return nb::steal(checked(PyObject_GetAttr(here_.ptr(), name)));
    }

    // -- writing

    int begin_write(bool copies, int64_t process) {
        if (!is_whole()) return kCut;
        if (!checked_cells().try_turn()) return kTaken;
        cells_.set(q4::kWriterProcess, process);
        const int64_t word = cells_.word(q4::kCurrent), version = word >> 8;
        if (is_shut || cells_.word(q4::kClosed) || cells_.word(q4::kTainted) == version + 1 || version >= q4::kMaxVersion) return kLook;
        const auto current = static_cast<size_t>(word & 255);
        if (!is_untouched(current, version)) return kLook;
        const int slot = cells_.free_slot();
        if (slot < 0) return kFull;
        if (copies && content_bytes_ <= kCopiedHere) {
            std::memcpy(data(static_cast<size_t>(slot)), data(current), static_cast<size_t>(content_bytes_));
            if (!is_untouched(current, version)) return kLook;
        }
        return slot;
    }

    // As above where there is one slot; the word says from then on that it is written.
    int begin_in_place(int64_t process) {
        if (!is_whole()) return kCut;
        if (!try_turn()) return kTaken;
        const int64_t word = cells_.word(q4::kCurrent), version = word >> 8;
        if (is_shut || cells_.word(q4::kClosed) || (word & 255) != q4::kHealthy || version >= q4::kMaxVersion) return kLook;
        if (cells_.is_readers_turn() || !is_untouched(0, version)) return kLook;
        cells_.set(q4::kWriterProcess, process);
        if (!cells_.claim()) return kFull;
        // Whoever read until now may have changed it.
        if (cells_.word(q4::kCurrent) != word) return kLook;
        mark();
        return 0;
    }

    bool try_turn() {
        has_published = false;
        return checked_cells().try_turn();
    }

    // Say that the content is being written, before the first store to it.
    void mark() {
        checked_cells().declare(q4::kWriting);
        is_marked = true;
    }

    // Take that back, if nothing was written.
    void unmark() {
        if (!is_marked) return;
        is_marked = false;
        const auto& cells = checked_cells();
        if (cells.has_turn() && (cells.word(q4::kCurrent) & 255) == q4::kWriting) cells_.declare(q4::kHealthy);
    }

    int64_t end_in_place() {
        const auto& cells = checked_cells();
        if (!is_marked || !cells.has_turn() || cells.word(q4::kClosed) || (cells.word(q4::kCurrent) & 255) != q4::kWriting) return kLook;
        const int64_t version = publish(0);
        end_turn();
        return version;
    }

    void end_turn() {
        is_marked = false;
        checked_cells().end_turn();
    }

    bool copies_here() const { return content_bytes_ <= kCopiedHere; }

    // Publish the slot and give back the turn, unless somebody has closed it or changed what it was made from.
    int64_t end_write(int slot) {
        const auto& cells = checked_cells();
        if (!cells.is_own() || cells.word(q4::kClosed) || cells.word(q4::kTainted) == (cells.word(q4::kCurrent) >> 8) + 1) return kLook;
        const int64_t version = publish(slot);
        cells_.end_turn();
        return version;
    }

    // Make what is in the slot the next version, and return its number.
    int64_t publish(int slot) {
        const int64_t version = (checked_cells().word(q4::kCurrent) >> 8) + 1;
        note(slot, version);
        is_marked = false, has_published = true;
        cells_.publish(version, slot);
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
        return cells_.word(q4::kBarred) == 0;
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
    void unlink(View& view);
    int64_t reads = 0;
    bool is_shut = false;
    const bool is_in_place;
    int file;  // what is mapped, open once more
    bool is_held = false;  // by blocks that the caller counts
    bool is_marked = false;  // by this process's update
    bool has_published = false;  // since it last tried to get the turn

  private:
    // Sleep until there is another word, while other threads may close.
    void wait_for(q4::Word which, q4::Word awaited, int64_t known, double seconds) {
        auto& cells = checked_cells();
        ++waiting_;
        {
            nb::gil_scoped_release without;
            cells.await(which, awaited, known, seconds);
        }
        --waiting_;
        if (is_closed_) release();
    }

    void release() {
        if (waiting_ == 0 && buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
    }

    void* data(size_t slot) const {
        const int64_t stride = (content_bytes_ + q4::kPage - 1) / q4::kPage * q4::kPage;
        return static_cast<char*>(buffer_.buf) + q4::kPage + q4::kRows * q4::kRowBytes + stride * static_cast<int64_t>(slot);
    }

    nb::object here_;
    int64_t content_bytes_;
    Py_buffer buffer_{};
    q4::Cells cells_;
    std::vector<Slot> slots_;
    View* first_ = nullptr;  // of the views inside their block
    int open_ = 0, waiting_ = 0;
    bool is_closed_ = false;
};

// What ``read()`` gives.
class View {
  public:
    View(nb::object content, nb::object owner, Core& core, nb::object timeout)
        : content_(std::move(content)), owner_(std::move(owner)), core_(core), timeout_(std::move(timeout)) {}
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() {
        if (stage_ == kInside) core_.unlink(*this);
    }

    void enter() {
        if (stage_ != kNew) content_.attr("refuse_again")();
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
            if (cells.word(q4::kClosed) || cells.word(q4::kTainted) == version_ + 1) {
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
                if (core_.is_shut) content_.attr("let_go")();
                if (core_.is_in_place && is_somebody_writing()) content_.attr("hand_over")();
            }
        } else if (stage_ == kInTurn) {
            stage_ = kLeft;
            ++core_.reads;
            turn_.attr("__exit__")(nb::none(), error, nb::none());
        } else if (stage_ == kPutOut) {
            stage_ = kLeft;
            content_.attr("refuse_late")(error);
        }
    }

    nb::object tensor() {
        if (!alias_.is_valid()) {
            if (stage_ == kInTurn) return turn_.attr("tensor");
            if (stage_ != kInside) content_.attr("refuse_outside")();
            static PyObject* const name = PyUnicode_InternFromString("detach");
            alias_ = nb::steal(checked(PyObject_CallMethodNoArgs(base().ptr(), name)));
        }
        return alias_;
    }

    nb::object base() const {
        if (stage_ == kInTurn) return turn_.attr("base");
        if (stage_ != kInside) throw nb::attribute_error("base");
        return core_.slot(slot_).tensor;
    }
    int64_t version() const {
        if (version_ < 0) throw nb::attribute_error("version");
        return version_;
    }

    void put_out() { stage_ = kPutOut; }
    bool is_of(nb::handle thread) const { return thread_.is(thread); }
    bool is_abandoned() const { return nb::steal(PyObject_CallNoArgs(thread_.ptr())).is_none(); }

    View *before = nullptr, *after = nullptr;
    int slot_ = -1;

  private:
    enum Stage { kNew, kInside, kInTurn, kPutOut, kLeft };

    bool is_somebody_writing() const { return nb::cast<bool>(content_.attr("gate").attr("has_writer")); }

    // Where there is one slot: take it, if nobody writes or waits to, and there is nothing to complain about.
    bool enter_at_once() {
        if (core_.is_shut || !core_.cells().is_own() || !core_.is_whole()) return false;
        if (!core_.is_reading(thread_) && (is_somebody_writing() || !core_.hold_fast())) return false;
        slot_ = 0;
        core_.link(*this);
        stage_ = kInside;
        const auto& cells = core_.cells();
        const int64_t word = cells.word(q4::kCurrent);
        if ((word & 255) != q4::kHealthy || cells.word(q4::kClosed)) {
            leave();
            return false;
        }
        version_ = word >> 8;
        if (!core_.is_untouched(0, version_)) leave_after_a_change(true);
        changes_ = core_.slot(0).changes;
        return true;
    }

    // Wait among the threads of this process, then among the processes; or be told why not.
    void enter_in_turn() {
        turn_ = content_.attr("read_in_turn")(timeout_);
        turn_.attr("__enter__")();
        version_ = nb::cast<int64_t>(turn_.attr("version"));
        stage_ = kInTurn;
    }

    void look() {
        content_.attr("look")();
        if (core_.is_shut || !core_.cells().is_own()) throw nb::value_error("it is closed");
    }

    void take() {
        auto& cells = core_.cells();
        int64_t word;
        do {  // begins anew only after another version was published
            word = cells.word(q4::kCurrent);
            slot_ = static_cast<int>(word & 255);
            // Where this process reads already, nobody can have begun to write.
            if (core_.slot(slot_).readers == 0) word = cells.hold(slot_);
        } while (word < 0);
        version_ = word >> 8;
        core_.link(*this);
        stage_ = kInside;
    }

    void leave() {
        if (stage_ == kInside) core_.unlink(*this);  // else it was put out meanwhile
        stage_ = kLeft;
    }

    // It is told while the slot is still held, so that it is told of this version.
    void leave_after_a_change(bool raises) {
        try {
            content_.attr("tell_of_a_change")(slot_, version_);
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

void Core::link(View& view) {
    view.before = nullptr, view.after = first_;
    if (first_ != nullptr) first_->before = &view;
    first_ = &view;
    ++open_, ++slot(view.slot_).readers;
}

void Core::unlink(View& view) {
    (view.before != nullptr ? view.before->after : first_) = view.after;
    if (view.after != nullptr) view.after->before = view.before;
    --open_;
    if (--slot(view.slot_).readers != 0) return;
    if (!is_in_place) {
        cells_.let_go(view.slot_);
    } else if (!is_held) {
        cells_.leave_slot();
    }
}

void Core::put_all_out() {
    for (View* view = first_; view != nullptr; view = view->after) view->put_out();
    first_ = nullptr, open_ = 0;
}

// In a child nobody is inside: what the parent's threads hold is the parent's.
void Core::after_fork() {
    put_all_out();
    for (auto& slot : slots_) slot.readers = 0, slot.version = -1;
    reads = waiting_ = 0;
    is_held = is_marked = has_published = false;
    cells_.leave();
}

bool Core::is_reading(nb::handle thread) const {
    for (const View* view = first_; view != nullptr; view = view->after) {
        if (view->is_of(thread)) return true;
    }
    return false;
}

// Put out readers whose thread has ended.
int Core::reclaim() {
    int count = 0;
    for (View *view = first_, *next; view != nullptr; view = next) {
        next = view->after;
        if (view->is_abandoned()) {
            unlink(*view);
            view->put_out();
            ++count;
        }
    }
    return count;
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // daemon threads may hold blocks when the interpreter ends
    module.attr("LAYOUT") = q4::kLayout;
    module.attr("ROWS") = q4::kRows;
    module.attr("TAKEN") = static_cast<int>(kTaken);
    module.attr("FULL") = static_cast<int>(kFull);
    module.attr("CUT") = static_cast<int>(kCut);
    nb::class_<View>(module, "View")
        .def("__enter__", [](nb::object self) { nb::cast<View&>(self).enter(); return self; })
        .def("__exit__", [](View& self, nb::handle, nb::handle error, nb::handle) { self.exit(error); },
             nb::arg("kind").none(), nb::arg("error").none(), nb::arg("trace").none())
        .def_prop_ro("tensor", &View::tensor)
        .def_prop_ro("base", &View::base)
        .def_prop_ro("version", &View::version);
    nb::class_<Core>(module, "Core")
        .def(nb::init<const nb::object&, const nb::list&, nb::object, int64_t, int>())
        .def("read", [](nb::object self, nb::object content, nb::object timeout) {
                 return new View(std::move(content), self, nb::cast<Core&>(self), std::move(timeout));
             }, nb::arg("content"), nb::arg("timeout").none() = nb::none(), nb::rv_policy::take_ownership)
        .def("enter", &Core::enter)
        .def("after_fork", &Core::after_fork)
        .def("close", &Core::close)
        .def("is_reading", &Core::is_reading)
        .def("reclaim", &Core::reclaim)
        .def("begin_write", &Core::begin_write)
        .def("publish", &Core::publish)
        .def("end_write", &Core::end_write)
        .def("note", &Core::note)
        .def("is_untouched", &Core::is_untouched)
        .def("end_turn", &Core::end_turn)
        .def("try_turn", &Core::try_turn)
        .def("begin_in_place", &Core::begin_in_place)
        .def("end_in_place", &Core::end_in_place)
        .def("mark", &Core::mark)
        .def("unmark", &Core::unmark)
        .def("claim", [](Core& self) { return self.checked_cells().claim(); })
        .def("bury", [](Core& self, int64_t dead) { self.checked_cells().bury(dead); })
        .def("poison", [](Core& self) { self.checked_cells().declare(q4::kPoisoned); })
        .def("hold_in_turn", &Core::hold_in_turn)
        .def("let_go", &Core::let_go)
        .def("say_kept_out", [](Core& self, bool is_any) { self.cells().say_kept_out(is_any); })
        .def("keeps_out", [](Core& self) { return self.checked_cells().is_any(q4::kKeptOut); })
        .def("is_readers_turn", [](Core& self) { return self.checked_cells().is_readers_turn(); })
        .def("wait_bar", &Core::wait_bar)
        .def("wait_readers", [](Core& self, double seconds) { self.wait_for_bit(q4::kReads, seconds); })
        .def("wait_kept_out", [](Core& self, double seconds) { self.wait_for_bit(q4::kKeptOut, seconds); })
        .def("inherit_turn", [](Core& self, int64_t from) { return self.checked_cells().inherit_turn(from); })
        .def("free_slot", [](Core& self) { return self.checked_cells().free_slot(); })
        .def("token", [](Core& self, int row) { return self.checked_cells().token(row); })
        .def("reads_any", [](Core& self, int row) { return self.checked_cells().reads(row); })
        .def("clear", [](Core& self, int row) { self.checked_cells().clear(row); })
        .def("wake", [](Core& self) { if (self.is_whole()) self.checked_cells().wake(q4::kCurrent, q4::kAwaited); })
        .def("wait_turn", &Core::wait_turn)
        .def("wait", &Core::wait)
        .def_prop_ro("copies_here", &Core::copies_here)
        .def_prop_ro("turn", [](Core& self) { return self.checked_cells().turn(); })
        .def_prop_ro("rows_used", [](Core& self) { return self.checked_cells().word(q4::kRowsUsed); })
        .def_prop_ro("current", [](Core& self) { return self.checked_cells().word(q4::kCurrent); })
        .def_prop_ro("barred", [](Core& self) { return self.checked_cells().word(q4::kBarred); })
        .def_prop_ro("has_turn", [](Core& self) { return self.checked_cells().has_turn(); })
        .def_prop_ro("is_holding", &Core::is_holding)
        .def_ro("is_marked", &Core::is_marked)
        .def_ro("has_published", &Core::has_published)
        .def_prop_ro("open", &Core::open)
        .def_prop_ro("is_own", [](Core& self) { return self.cells().is_own(); })
        .def_prop_ro("row", [](Core& self) { return self.cells().row(); })
        .def_rw("file", &Core::file)
        .def_rw("reads", &Core::reads)
        .def_rw("is_shut", &Core::is_shut);
}
