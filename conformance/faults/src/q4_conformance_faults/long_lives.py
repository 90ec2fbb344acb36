"""Planted faults that show over a layer's life, and those that end a process, with the case that must catch each."""

from __future__ import annotations

from typing import Any

from q4_conformance.outcome import Outcome
from q4_conformance_faults import boundary, conduct, lives, quantisers
from q4_conformance_faults.fault import Fault

__all__ = ["LIFE_FAULTS"]

_NF4 = "nf4-plain-high_first-48x256b64-s0/"
_TAIL = "nf4-plain-high_first-67x192b64-s0/"
_ENDS: dict[str, Any] = {"ends": Outcome.CRASH, "says": "ended by SIGSEGV"}

LIFE_FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format=format_, caught_by=case, **({"is_numeric": False} | facts))
    for name, make, format_, case, facts in (
        ("leaks-per-call", lives.LeaksPerCall, "nf4", "TC-18/calls", {"says": "memory grew by"}),
        ("leaks-per-backward", lives.LeaksPerBackward, "nf4", "TC-20/frozen", {"says": "memory grew by"}),
        ("keeps-memory-after-dispose", lives.KeepsAfterDispose, "nf4", "EX-09/dispose", {"says": "bytes stayed"}),
        ("shares-one-buffer", lives.SharesOneBuffer, "nf4", "TC-09/prepare", {"says": "other bits"}),
        ("numbers-its-layers", lives.NumbersItsLayers, "nf4", "TC-09/prepare", {"says": "meta is"}),
        ("knows-by-address", lives.KnowsByAddress, "nf4", "EX-15/copies", {"says": "deeply copied layer"}),
        (
            "sends-other-scales",
            boundary.WrongExportLater,
            "nf4",
            "EX-15/elsewhere",
            {"says": "in the other process the weight differs in its scales"},
        ),
        ("mutates-state-dict", lives.MutatesState, "nf4", "EX-06/state", {"says": "running changed"}),
        ("ignores-out-for-m-5", lives.WritesNothing, "nf4", "TC-09/out", {"says": "non_finite"}),
        (
            "wrong-out-dtype",
            lives.RoundsToInputDtype,
            "nf4",
            f"EX-02/dtypes/{_NF4}bfloat16",
            {"says": "torch.bfloat16 to torch.float32"},
        ),
        ("drops-gradients", lives.DropsGradients, "nf4", f"EX-05/gradient/{_TAIL}float32", {"says": "all_zero"}),
        ("reads-one-block-past-the-end", lives.ReadsPastEnd, "nf4", f"EX-08/last-page/{_TAIL}float32/exact", _ENDS),
        ("pads-with-neighbours", lives.PadsWithNeighbours, "nf4", "TC-11/strided", {"says": "non_finite"}),
        ("lies-about-alignment", lives.LiesAboutAlignment, "nf4", "TC-11/strided", {"says": "M = 1"}),
        ("hidden-fallback", lives.HiddenFallback, "nf4", "EX-14/kind", {"says": "alive at once"}),
        ("rounds-with-bias", quantisers.BiasedQuantiser, "mxfp4", "EX-13/stochastic", {"says": "standard deviations"}),
        ("ignores-its-seed", quantisers.IgnoresSeed, "mxfp4", "EX-13/stochastic", {"says": "the same seed"}),
        ("leaks-quantised", quantisers.LeakingQuantiser, "mxfp4", "TC-18/quantiser", {"says": "memory grew by"}),
        ("crashes", conduct.Crashes, "nf4", f"EX-01/rows/{_NF4}float32/exact", _ENDS),
        (
            "hangs",
            conduct.Hangs,
            "nf4",
            f"EX-01/rows/{_NF4}float32/exact",
            {"ends": Outcome.TIMEOUT, "says": "no answer for"},
        ),
    )
)
