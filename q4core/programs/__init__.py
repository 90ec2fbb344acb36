"""Programs: lists of operations that a backend runs by one call, bound to buffers and layers.

``bind`` chooses a backend, proves it and returns what runs; ``refuse`` notes why there is no program.
"""

from q4core.backend.program import BoundLayer, Buffer, Op, Program, Runner, RunsPrograms, Step, View
from q4core.layers.diagnosis import ProgramRecord
from q4core.programs.binding import BoundProgram, bind
from q4core.programs.records import refuse

__all__ = [
    "BoundLayer",
    "BoundProgram",
    "Buffer",
    "Op",
    "Program",
    "ProgramRecord",
    "Runner",
    "RunsPrograms",
    "Step",
    "View",
    "bind",
    "refuse",
]
