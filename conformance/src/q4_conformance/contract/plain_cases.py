"""The tables of cases of the core, dialects, files, memory and layer types: none judges a weight that it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.contract.case import Case
from q4core import BUILTIN_FORMATS, find_format

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4core import Format


_SLOW = {"bare", "quantise_often", "train_long", "file_cut", "file_hostile"}


def _cases(profile: str, rows: Iterable[tuple[str, str, str, str]], **facts: Any) -> tuple[Case, ...]:
    """Return a case for each (contract, part, check, text)."""
    return tuple(
        Case(contract, part, text, name, profile=profile, is_slow=name in _SLOW, **facts)
        for contract, part, name, text in rows
    )


def core_cases() -> tuple[Case, ...]:
    """Return the cases that concern the core and its reference path."""
    rows = (
        ("TC-01", "detect", "detect_nf4", ".weight/.absmax/.quant_map is NF4, with the right keys"),
        ("TC-02", "detect", "detect_nvfp4", ".qdata/.scale is NVFP4, with the right keys"),
        ("TC-03", "validate", "validate", "every problem is reported at once"),
        ("TC-06", "bare", "bare", "the core and the reference alone run, without compiled code of ours"),
        ("TC-07", "prefer", "prefer_unified", "PREFER_UNIFIED falls back with a reason and the same numbers"),
        ("TC-08", "require", "require_unified", "REQUIRE_UNIFIED fails at once, naming the attributes"),
        ("TC-18", "often", "quantise_often", "10,000 calls: finite, bit-stable, memory flat"),
        ("TC-19", "gradients", "ste_gradients", "linear_ste has the analytic gradients"),
        ("TC-20", "training", "train_long", "1,000 steps: finite gradients, falling loss, memory flat"),
        ("TC-23", "activation", "prefer_activation", "PREFER_UNIFIED never copies an activation"),
        ("EX-12", "plugins", "core_isolation", "a broken plugin is recorded and reported, and stops no other"),
    )
    return _cases("core", rows)


def dialect_cases(formats: Iterable[str | Format] = tuple(BUILTIN_FORMATS)) -> tuple[Case, ...]:
    """Return the cases that concern a dialect, for each format that it may hold."""
    rows = (
        ("TC-03", "validate", "dialect_validate", "every damage is reported by its key, all at once"),
        ("EX-11", "golden", "dialect_golden", "golden layers give the package's numbers, and their own bytes again"),
        ("EX-11", "round", "dialect_round", "written and read, a weight is the same, bit for bit"),
        ("EX-11", "convert", "dialect_convert", "to other dialects of the format and back: the same bytes, or refused"),
    )
    foreign = ("TC-03", "foreign", "dialect_foreign", "nothing foreign is claimed, and what is claimed is read right")
    cases = _cases("dialect", [foreign])
    for kind in map(find_format, formats):
        contract = "TC-01" if kind.has_flat_blocks else "TC-02"
        found = (contract, "detect", "dialect_detect", "written layers are found, by their own keys alone")
        cases += _cases("dialect", (found, *rows), format=kind.name)
    return cases


def memory_cases() -> tuple[Case, ...]:
    """Return the cases that concern a provider of managed memory."""
    rows = (
        ("TC-07", "capability", "capability", "the provider says of each device whether, why, by which attributes"),
        ("TC-07", "promoted", "prefer_provider", "PREFER_UNIFIED promotes or falls back with a reason, same numbers"),
        ("TC-08", "refused", "require_provider", "REQUIRE_UNIFIED fails at once, naming the provider's attributes"),
        ("TC-21", "convert", "convert_managed", "managed, same data and shape, both views show the same bytes"),
        ("TC-21", "empty", "managed_empty", "empty tensors never share bytes, and give them back"),
        ("TC-22", "mutable", "mutable_variable", "Q4_DISABLE_UM=0 promotes a mutable tensor, 1 does not"),
        ("TC-23", "storage", "managed_activation", "the same storage comes back: no allocation, no copy, counted"),
    )
    return _cases("memory", rows)


def layer_cases() -> tuple[Case, ...]:
    """Return the cases that concern a layer type."""
    rows = (
        ("shapes", "results have the shape that the type says, and what does not fit is refused"),
        ("gradients", "gradients are what differences show; straight-through ones of parameters are finite"),
        ("state", "loaded, copied and moved layers give the same bits"),
        ("training", "some steps lower the loss, with a finite gradient of each parameter"),
        ("lifetime", "layers and tensors that were released are gone"),
    )
    return _cases("layer", [("EX-20", part, f"layer_{part}", text) for part, text in rows])


def file_cases() -> tuple[Case, ...]:
    """Return the cases that concern a reader of files, and the writer of its name."""
    read = (
        ("detect", "its own files are recognised, foreign ones and odd paths left alone"),
        ("whole", "every tensor is there under its name, bit for bit, and is no way into the file"),
        ("lazy", "opening maps a large file and reads little of it; tensors are views, or copies where asked for"),
        ("cut", "a file that was cut anywhere is refused by a typed error that names it"),
        (
            "hostile",
            "damaged headers are read right or refused by name, in bounded time and memory, all problems at once",
        ),
        ("names", "names that are there twice are refused, and all of them reported"),
        ("parts", "a model in several files is whole, or its missing, foreign or damaged part is named"),
    )
    written = (
        ("round", "weights and tensors are read as they were written, bit for bit"),
        ("atomic", "a writer that fails leaves the old file, and no other"),
        ("killed", "a writer that is killed leaves the old file, and the next one clears up"),
        ("stream", "tensors that come one by one are written in the memory of one"),
    )
    rows = [("EX-23", part, f"file_{part}", text) for part, text in read]
    rows += [("EX-24", part, f"file_write_{part}", text) for part, text in written]
    return _cases("file", rows)
