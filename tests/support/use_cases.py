"""The use cases of q4core, and the contract cases that prove each: data alone."""

from __future__ import annotations

__all__ = ["USES", "USE_CASES"]

USE_CASES = {
    "UC-01": "Load a 4-bit checkpoint of whatever dialect",
    "UC-02": "Choose who computes, and be obeyed or refused",
    "UC-03": "Run on the machine at hand, from the bare core to native kernels",
    "UC-04": "Keep tensors in unified memory, by policy",
    "UC-05": "Compute and train with 4-bit layers, in right numbers",
    "UC-06": "Learn what ran, and why nothing else did",
    "UC-07": "Share mutable state between actors, for as long as they live",
}
"""Ids are stable; docs/use-cases.md describes each one."""

_TABLE = {
    "TC-01": "01", "TC-02": "01", "TC-03": "01", "TC-04": "02", "TC-05": "02", "TC-06": "03", "TC-07": "04",
    "TC-08": "04", "TC-09": "05", "TC-10": "05", "TC-11": "06", "TC-12": "06", "TC-13": "07", "TC-14": "03 05",
    "TC-15": "03 05", "TC-16": "02", "TC-17": "02 06", "TC-18": "05 07", "TC-19": "05", "TC-20": "05 07",
    "TC-21": "04 07", "TC-22": "04 07", "TC-23": "04 05 07",
    "EX-01": "05", "EX-02": "05", "EX-03": "05", "EX-04": "05 07", "EX-05": "05", "EX-06": "01 05", "EX-07": "05",
    "EX-08": "05 06", "EX-09": "04 07", "EX-10": "05", "EX-11": "01", "EX-12": "02 06", "EX-13": "05", "EX-14": "06",
    "EX-15": "05 07", "EX-16": "01 05", "EX-17": "02 06", "EX-18": "03 05", "EX-19": "02 05", "EX-20": "05",
    "EX-21": "05", "EX-22": "05", "EX-23": "01 06", "EX-24": "01", "EX-25": "05",
}  # fmt: skip
USES = {contract: tuple(f"UC-{number}" for number in numbers.split()) for contract, numbers in _TABLE.items()}
"""Contract case → the use cases that it proves."""
