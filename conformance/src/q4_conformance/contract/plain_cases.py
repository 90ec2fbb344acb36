"""The tables of cases of the core, dialects, memory and layer types: none of them judges a weight that it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_conformance.contract.case import Case
from q4core import BUILTIN_FORMATS, find_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from q4core import Format


def core_cases() -> tuple[Case, ...]:
    """Return the cases that concern the core and its reference path."""
    rows: Sequence[tuple[str, str, str, str, bool]] = (
        ("TC-01", "detect", "detect_nf4", ".weight/.absmax/.quant_map is NF4, with the right keys", False),
        ("TC-02", "detect", "detect_nvfp4", ".qdata/.scale is NVFP4, with the right keys", False),
        ("TC-03", "validate", "validate", "every problem is told at once", False),
        ("TC-06", "bare", "bare", "the core and the reference alone run, without compiled code of ours", True),
        ("TC-07", "prefer", "prefer_unified", "PREFER_UNIFIED falls back with a reason and the same numbers", False),
        ("TC-08", "require", "require_unified", "REQUIRE_UNIFIED fails at once, naming the attributes", False),
        ("TC-18", "often", "quantise_often", "10,000 calls: finite, bit-stable, memory flat", True),
        ("TC-19", "gradients", "ste_gradients", "linear_ste has the analytic gradients", False),
        ("TC-20", "training", "train_long", "1,000 steps: finite gradients, falling loss, memory flat", True),
        ("TC-23", "activation", "prefer_activation", "PREFER_UNIFIED never copies an activation", False),
        ("EX-12", "plugins", "core_isolation", "a broken plugin is recorded and told, and stops nobody", False),
    )
    return tuple(
        Case(contract, part, text, name, profile="core", is_slow=is_slow)
        for contract, part, name, text, is_slow in rows
    )


def dialect_cases(formats: Iterable[str | Format] = tuple(BUILTIN_FORMATS)) -> tuple[Case, ...]:
    """Return the cases that concern a dialect, for each format that it may hold."""
    rows: Sequence[tuple[str, str, str, str]] = (
        ("{detect}", "detect", "dialect_detect", "written layers are found, by their own keys alone"),
        ("TC-03", "validate", "dialect_validate", "every damage is told by its key, all at once"),
        ("EX-11", "golden", "dialect_golden", "golden layers give the package's numbers, and their own bytes again"),
        ("EX-11", "round", "dialect_round", "written and read, a weight is the same, bit for bit"),
        ("EX-11", "convert", "dialect_convert", "to other dialects of the format and back: the same bytes, or refused"),
    )
    text = "nothing foreign is claimed, and what is claimed is read right"
    foreign = Case("TC-03", "foreign", text, "dialect_foreign", profile="dialect")
    cases = [foreign]
    for item in formats:
        kind = find_format(item)
        detect = "TC-01" if kind.has_flat_blocks else "TC-02"
        cases += [
            Case(contract.format(detect=detect), part, text, name, profile="dialect", format=kind.name)
            for contract, part, name, text in rows
        ]
    return tuple(cases)


def memory_cases() -> tuple[Case, ...]:
    """Return the cases that concern a provider of managed memory."""
    rows: Sequence[tuple[str, str, str, str]] = (
        ("TC-07", "capability", "capability", "the provider says of each device whether, why, by which attributes"),
        ("TC-07", "promoted", "prefer_provider", "PREFER_UNIFIED promotes or falls back with a reason, same numbers"),
        ("TC-08", "refused", "require_provider", "REQUIRE_UNIFIED fails at once, naming the provider's attributes"),
        ("TC-21", "convert", "convert_managed", "managed, data and shape kept, both views show the same bytes"),
        ("TC-21", "empty", "managed_empty", "empty tensors never share bytes, and give them back"),
        ("TC-22", "mutable", "mutable_variable", "Q4_DISABLE_UM=0 promotes a mutable tensor, 1 does not"),
        ("TC-23", "storage", "managed_activation", "the same storage comes back: no allocation, no copy, counted"),
    )
    return tuple(Case(contract, part, text, name, profile="memory") for contract, part, name, text in rows)


def layer_cases() -> tuple[Case, ...]:
    """Return the cases that concern a layer type."""
    rows: Sequence[tuple[str, str]] = (
        ("shapes", "results have the shape that the type says, and what does not fit is refused"),
        ("gradients", "gradients are what differences show; straight-through ones of parameters are finite"),
        ("state", "loaded, copied and moved layers give the same bits"),
        ("training", "some steps lower the loss, with a finite gradient of each parameter"),
        ("lifetime", "layers and tensors that were let go are gone"),
    )
    return tuple(Case("EX-20", part, text, f"layer_{part}", profile="layer") for part, text in rows)
