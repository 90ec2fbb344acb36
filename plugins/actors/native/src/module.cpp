// The Python face.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "stamps.hpp"
#include "view.hpp"

namespace {

// Stamps at an address, of memory that the caller holds.
class StampTable {
  public:
    StampTable(uint64_t address, int64_t count) : stamps_(reinterpret_cast<void*>(address), count) {}

    int64_t value(int64_t which) const { return stamps_.value(checked(which)); }
    void publish(int64_t which, int64_t value) { stamps_.publish(checked(which), value); }

    int wait(const std::vector<std::pair<int64_t, int64_t>>& needs, int64_t stop, double seconds) const {
        std::vector<q4::Need> all;
        for (const auto& [stamp, least] : needs) all.push_back({checked(stamp), least});
        const q4::Need* begin = all.data();
        const q4::Need* const end = begin + all.size();
        if (stamps_.reached(begin, end)) return q4::kReached;
        if (stop >= 0) checked(stop);
        PyThreadState* const here = PyEval_SaveThread();
        const int found = stamps_.wait(begin, end, stop, seconds);
        q4::while_it_runs([&] { PyEval_RestoreThread(here); });
        return found;
    }

    // own: stamps to publish. needs: stamps, and how many steps back.
    q4::Turns* turns(std::vector<int64_t> own, const std::vector<std::pair<int64_t, int64_t>>& needs, int64_t stop, double seconds) const {
        std::vector<q4::Need> all;
        for (const auto& [stamp, back] : needs) all.push_back({checked(stamp), -back});
        for (int64_t which : own) checked(which);
        return new q4::Turns(stamps_, std::move(own), std::move(all), stop < 0 ? -1 : checked(stop), seconds);
    }

  private:
    int64_t checked(int64_t which) const {
        if (which < 0 || which >= stamps_.count()) throw nanobind::index_error("no such stamp");
        return which;
    }

    q4::Stamps stamps_;
};

}  // namespace

NB_MODULE(_native, module) {
    namespace nb = nanobind;
    using q4::Core;
    using q4::View;
    nb::set_leak_warnings(false);  // daemon threads may hold blocks when the interpreter ends
    module.attr("ROWS") = q4::kRows;
    nb::class_<StampTable>(module, "Stamps")
        .def(nb::init<uint64_t, int64_t>())
        .def("value", &StampTable::value)
        .def("publish", &StampTable::publish)
        .def("wait", &StampTable::wait)
        .def("turns", &StampTable::turns, nb::rv_policy::take_ownership, nb::keep_alive<0, 1>());
    nb::class_<q4::Turns>(module, "Turns")
        .def("begin", &q4::Turns::begin)
        .def("__call__", &q4::Turns::turn, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("address", [](q4::Turns& self) {
            return std::pair(reinterpret_cast<uintptr_t>(&q4::Turns::call), reinterpret_cast<uintptr_t>(&self));
        });
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
             }, nb::arg("protocol"), nb::arg("timeout").none() = nb::none(), nb::rv_policy::take_ownership)
        .def("enter", &Core::enter)
        .def("after_fork", &Core::after_fork)
        .def("close", &Core::close)
        .def("is_reading", &Core::is_reading)
        .def("reclaim", &Core::reclaim)
        .def("begin", &Core::begin)
        .def("end", &Core::end)
        .def("is_untouched", &Core::is_untouched)
        .def("end_turn", &Core::end_turn)
        .def("unmark", [](Core& self) { if (self.is_whole()) self.unmark(); })
        .def("bury", [](Core& self, int64_t dead) { self.checked_cells().bury(dead); })
        .def("poison", [](Core& self) { self.checked_cells().declare(q4::kPoisoned); })
        .def("hold_in_turn", &Core::hold_in_turn)
        .def("release", [](Core& self) { if (self.is_whole()) self.let_go(); })
        .def("say_kept_out", [](Core& self, bool is_any) { if (self.is_whole()) self.cells().say_kept_out(is_any); })
        .def("keeps_out", [](Core& self) { return self.checked_cells().is_any(q4::kKeptOut); })
        .def("is_readers_turn", [](Core& self) { return self.checked_cells().is_readers_turn(); })
        .def("wait_bar", &Core::wait_bar)
        .def("wait_readers", [](Core& self, double seconds) { self.wait_for_bit(q4::kReads, seconds); })
        .def("wait_kept_out", [](Core& self, double seconds) { self.wait_for_bit(q4::kKeptOut, seconds); })
        .def("inherit_turn", [](Core& self, int64_t from) { return self.checked_cells().inherit_turn(from); })
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
        .def_prop_ro("open", &Core::open)
        .def_prop_ro("is_own", [](Core& self) { return self.cells().is_own(); })
        .def_prop_ro("row", [](Core& self) { return self.cells().row(); })
        .def_rw("file", &Core::file)
        .def_rw("reads", &Core::reads)
        .def_rw("is_shut", &Core::is_shut);
}
