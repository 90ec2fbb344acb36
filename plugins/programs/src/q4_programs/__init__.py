"""Programs: lists of operations that a backend runs by one call, bound to buffers and layers.

``make_program`` makes one of a network, ``bind`` chooses a backend for a list of operations and proves it, ``refuse``
notes why there is no program. A backend that runs programs has the method of ``RunsPrograms``.
"""

from q4_programs.binding import BoundProgram, bind
from q4_programs.builder import ProgramBuilder
from q4_programs.contract import BoundLayer, Runner, RunsPrograms, Turns
from q4_programs.emitters import EMITTERS, emit_parts, emit_recurrent, emit_rms_norm
from q4_programs.network import NetworkProgram, layers_of, make_program
from q4_programs.operations import EmissionError, Value
from q4_programs.ops import Op
from q4_programs.program import Buffer, Program, Step, View
from q4_programs.records import ProgramRecord, refuse
from q4_programs.reference import REFERENCE
from q4_programs.sparse import SparseBuilder, SparseWeight, add_in_order
from q4_programs.spiking import pack_bits, unpack_bits
from q4_programs.watch import Watch

__all__ = [
    "EMITTERS",
    "REFERENCE",
    "BoundLayer",
    "BoundProgram",
    "Buffer",
    "EmissionError",
    "NetworkProgram",
    "Op",
    "Program",
    "ProgramBuilder",
    "ProgramRecord",
    "Runner",
    "RunsPrograms",
    "SparseBuilder",
    "SparseWeight",
    "Step",
    "Turns",
    "Value",
    "View",
    "Watch",
    "add_in_order",
    "bind",
    "emit_parts",
    "emit_recurrent",
    "emit_rms_norm",
    "layers_of",
    "make_program",
    "pack_bits",
    "refuse",
    "unpack_bits",
]
