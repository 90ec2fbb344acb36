"""``Standing``: how far a path was proven before it came to this machine."""

from __future__ import annotations

import enum

__all__ = ["Standing"]


class Standing(enum.Enum):
    """What its makers know of a path on hardware of the kind at hand.

    It is no measure of speed (that is the tier), and no proof: whatever it says, a path serves after its self-probe.
    """

    MEASURED = "measured"
    """It ran on such hardware, and its configurations were chosen by recorded measurements there."""
    RAN = "ran"
    """It ran on such hardware."""
    COMPILED = "compiled"
    """It is compiled for such hardware, on which it never ran; its numbers were checked elsewhere, if at all."""
    INTERPRETED = "interpreted"
    """What runs here is an interpreter in the hardware's place: right numbers, and no word about the hardware."""
