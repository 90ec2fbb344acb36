"""The catalogue: backends and functions with one fault each, and the case that must catch it.

A kit that never fails proves nothing. Each fault below is the toy kernel with one method overridden, as a slip of the
pen would have it. Some are caught before any case's own numbers, because the core's self-probe disqualifies the path;
the case then fails because what was declared is refused. Others are made to pass the probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance_faults import boundary, conduct, numbers
from q4_conformance_faults.densities import DENSE_FAULTS
from q4_conformance_faults.fault import Fault
from q4_conformance_faults.long_lives import LIFE_FAULTS
from q4_conformance_faults.slips import SLIP_FAULTS
from q4_conformance_faults.ways import WAY_FAULTS

if TYPE_CHECKING:
    from q4_conformance_faults.toy import ToyKernel

__all__ = ["FAULTS", "crashing", "hanging", "talking"]


def crashing() -> ToyKernel:
    """Return a backend that kills its process at M = 7."""
    return conduct.Crashes("fault-crashes")


def talking() -> ToyKernel:
    """Return a right backend that prints while it computes."""
    return conduct.Talks("toy-talks")


def hanging() -> ToyKernel:
    """Return a backend that never comes back at M = 7."""
    return conduct.Hangs("fault-hangs")


_SEEN_BY_PROBE: dict[str, Any] = {"passes_probe": False, "says": "probe_failed"}
_WITH_CORE: dict[str, Any] = {"is_numeric": False}
_IN_ONE_CALL: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format=format_, caught_by=case, **facts)
    for name, make, format_, case, facts in (
        (
            "swapped-nibbles",
            numbers.SwappedNibbles,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "reciprocal-global",
            numbers.ReciprocalGlobal,
            "nvfp4",
            "TC-09/values/nvfp4-e4m3_mul-low_first-48x256b16-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "scale-off-by-one-block",
            numbers.ScaleOffByOne,
            "q4_0",
            "TC-09/values/q4_0-plain-half_split32-48x256b32-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "half-precision-scales",
            numbers.HalfPrecisionScales,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "half-precision-sums",
            numbers.HalfPrecisionSums,
            "mxfp4",
            "TC-09/values/mxfp4-e8m0-low_first-48x256b32-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "ignores-offset",
            numbers.IgnoresOffset,
            "q4_1",
            "TC-09/values/q4_1-plain-half_split32-48x256b32-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "ignores-zero-point",
            numbers.IgnoresZeroPoint,
            "int4",
            "TC-09/values/int4-plain-low_first-48x256b128-zero_point-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "ignores-permutation",
            numbers.IgnoresPermutation,
            "int4",
            "TC-09/values/int4-plain-low_first-48x256b128-input_permutation-zero_point-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "ignores-channel-scale",
            numbers.IgnoresChannelScale,
            "int4",
            "TC-09/values/int4-plain-low_first-48x256b128-input_channel_scale-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "ignores-codebook",
            numbers.IgnoresCodebook,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-custom_codebook-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "saturates-scales",
            numbers.SaturatesScales,
            "nf4",
            "EX-10/edges/nf4-plain-high_first-48x256b64-edges-s0/float32",
            _SEEN_BY_PROBE,
        ),
        (
            "clips-by-activation-scale",
            numbers.ClipsByActivationScale,
            "nvfp4",
            "TC-09/static/nvfp4-e4m3_mul-low_first-48x256b16-activation9.54e-07-s0/float32/exact",
            _SEEN_BY_PROBE,
        ),
        ("drops-tail", numbers.DropsTail, "int4", "TC-11/awkward", _SEEN_BY_PROBE),
        ("ignores-bias", numbers.IgnoresBias, "nf4", "TC-09/bias", {"says": "out_of_bound"}),
        ("rounds-before-bias", numbers.RoundsBeforeBias, "nf4", "TC-09/bias", {"says": "out_of_bound"}),
        ("one-zeroed-element", numbers.OneZero, "nf4", "EX-01/rows", {"says": "1 of 6144 elements"}),
        ("forgets-a-corner", numbers.ForgetsCorner, "nf4", "EX-01/shapes", {"says": "out_of_bound: 1 of"}),
        ("all-zero-for-m-17", numbers.AllZero17, "q8_0", "EX-01/rows", _SEEN_BY_PROBE),
        ("all-zero-for-m-127", numbers.AllZero127, "q8_0", "EX-01/rows", {"says": "all_zero"}),
        ("wrong-tile-for-many-rows", numbers.WrongTile, "nf4", "EX-01/rows", {**_SEEN_BY_PROBE, **_WITH_CORE}),
        ("nan-output", numbers.Nan, "nvfp4", "EX-01/rows", {"says": "non_finite"}),
        (
            "swaps-rows",
            numbers.SwapsRows,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "out_of_bound"},
        ),
        ("not-deterministic", numbers.Noise, "nf4", "EX-03/repeat", {"says": "other bits"}),
        (
            "hidden-int8",
            numbers.HiddenInt8,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            _SEEN_BY_PROBE,
        ),
        (
            "hidden-int8-unprobed",
            numbers.HiddenInt8Between,
            "nf4",
            "EX-01/noise/nf4-plain-high_first-48x256b64-s0/float32/exact",
            {"says": "noisy"},
        ),
        (
            "hidden-int8-in-bfloat16",
            numbers.HiddenInt8Between,
            "nf4",
            "EX-01/rows/nf4-plain-high_first-48x256b64-s0/bfloat16/exact",
            {"says": "M = 127: out_of_bound"},
        ),
        (
            "rounds-input",
            numbers.RoundsInput,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/float32",
            _SEEN_BY_PROBE,
        ),
        ("silences-nan", conduct.SilencesNan, "nf4", "EX-10/non-finite", {"says": "finite numbers"}),
        ("mutates-input", conduct.MutatesInput, "nf4", "EX-08/unmodified", {"says": "the input"}),
        (
            "halves-input",
            conduct.HalvesInput,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "wrote to x", "passes_probe": False},
        ),
        ("mutates-weight", conduct.MutatesWeight, "nf4", "EX-08/unmodified", {"says": "weight was written"}),
        ("writes-beside-codes", conduct.WritesBesideCodes, "nf4", "EX-08/unmodified", {"says": "beside qdata"}),
        ("writes-beside-out", conduct.WritesBeside, "nf4", "EX-08/unmodified", {"says": "beside out=", **_WITH_CORE}),
        ("not-thread-safe", conduct.SharedScratch, "nf4", "EX-04/threads", {"says": "other bits"}),
        (
            "not-thread-safe-across-layers",
            conduct.SharedPlace,
            "nf4",
            "EX-04/threads",
            {"says": "other bits from layer"},
        ),
        (
            "wrong-gradient",
            boundary.WrongExportLater,
            "q4_0",
            "EX-05/gradient/q4_0-plain-half_split32-67x96b32-s0/float32/exact",
            {"says": "gradient: ", **_WITH_CORE},
        ),
        (
            "wrong-own-gradient",
            boundary.WrongOwnGradient,
            "q4_0",
            "EX-05/gradient",
            {**_SEEN_BY_PROBE, **_WITH_CORE},
        ),
        (
            "wrong-own-gradient-later",
            boundary.WrongOwnGradientLater,
            "q4_0",
            "EX-05/gradient/q4_0-plain-half_split32-67x96b32-s0/float32/exact",
            {"says": "gradient: ", **_WITH_CORE},
        ),
        ("wrong-export", boundary.WrongExport, "q4_0", "EX-16/export", {**_SEEN_BY_PROBE, **_WITH_CORE}),
        ("wrong-export-later", boundary.WrongExportLater, "q4_0", "EX-16/export", {"says": "its scales", **_WITH_CORE}),
        ("exports-sorted-rows", boundary.ExportsSortedRows, "q4_0", "EX-16/export", {**_SEEN_BY_PROBE, **_WITH_CORE}),
        (
            "exports-junk",
            boundary.ExportsJunk,
            "q4_0",
            "EX-16/export",
            {"says": "must be a PackedWeight", "passes_probe": False, **_WITH_CORE},
        ),
        (
            "exports-too-few-rows",
            boundary.ExportsTooFew,
            "q4_0",
            "EX-16/export",
            {"says": "one of (47, 256)", "passes_probe": False, **_WITH_CORE},
        ),
        ("collapses-levels", boundary.CollapsesLevels, "nvfp4", "EX-16/export", {"says": "collapsed", **_WITH_CORE}),
        ("raises-in-check", conduct.RaisesInCheck, "nf4", "TC-04/override", {"says": "check raised", **_WITH_CORE}),
        (
            "raises-in-prepare",
            conduct.RaisesInPrepare,
            "nf4",
            "TC-04/override",
            {"says": "prepare raised", **_WITH_CORE},
        ),
        (
            "prepares-the-first-range",
            conduct.PreparesFirstRange,
            "nf4",
            "EX-19/ranges",
            {"says": "no code for 2 rows", "passes_probe": False, **_WITH_CORE},
        ),
        (
            "refuses-in-prepare",
            conduct.RefusesInPrepare,
            "nf4",
            "TC-04/override",
            {"says": "toolchain: a pretended lack of compilers", **_WITH_CORE},
        ),
        (
            "refuses-without-reason",
            conduct.RefusesWithoutReason,
            "nf4",
            "TC-04/override",
            {"says": "plugin_error: prepare refused without a Reason", **_WITH_CORE},
        ),
        (
            "prepares-nothing",
            boundary.PreparesNothing,
            "nf4",
            "TC-04/override",
            {"says": "at least one tensor", **_WITH_CORE},
        ),
        (
            "writes-codes-in-prepare",
            boundary.WritesCodes,
            "nf4",
            "EX-08/unmodified",
            {"says": "changed the caller's weight"},
        ),
        (
            "writes-scales-in-prepare",
            boundary.WritesScales,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "changed the caller's weight"},
        ),
        (
            "writes-in-later-prepare",
            boundary.WritesLater,
            "nf4",
            "EX-08/unmodified",
            {"says": "weight was written: scale"},
        ),
        (
            "namesake-of-a-proven-one",
            boundary.namesake,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/float32/exact",
            {**_SEEN_BY_PROBE, **_WITH_CORE},
        ),
        (
            "leaves-in-check",
            boundary.LeavesInCheck,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "check raised SystemExit", **_WITH_CORE},
        ),
        (
            "leaves-in-prepare",
            boundary.LeavesInPrepare,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "prepare raised SystemExit", **_WITH_CORE},
        ),
        (
            "leaves-in-linear",
            boundary.LeavesInLinear,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "raised SystemExit: no device", "passes_probe": False},
        ),
        ("leaves-in-a-later-linear", boundary.LeavesLater, "nf4", "EX-01/rows", {"says": "SystemExit"}),
        ("leaves-in-threads", boundary.LeavesInThreads, "nf4", "EX-04/threads", {"says": "SystemExit: not at home"}),
        ("raises-in-linear", conduct.RaisesInLinear, "nf4", "EX-01/rows", {"says": "tile out of range"}),
        (
            "refuses-what-it-declares",
            conduct.RefusesDeclared,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "not today", **_WITH_CORE},
        ),
        (
            "leaves-a-gap",
            conduct.LeavesGap,
            "nf4",
            "TC-09/values/nf4-plain-high_first-48x256b64-s0/",
            {"says": "no path for M in 17…32", **_WITH_CORE},
        ),
    )
)

FAULTS: tuple[Fault, ...] = (*_IN_ONE_CALL, *WAY_FAULTS, *SLIP_FAULTS, *DENSE_FAULTS, *LIFE_FAULTS)
