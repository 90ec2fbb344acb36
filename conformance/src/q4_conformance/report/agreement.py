"""What a document says of one subject in several places must agree: name, command, device, overrides and manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.outcome import Outcome
from q4_conformance.overrides import Override
from q4_conformance.report.tally import NO_FORMAT, format_of
from q4_conformance.subjects.backend import WISHES
from q4core import EVERY_FORMAT, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["disagreements"]

_OURS = ["q4", "conform"]
_OPTIONS = ("--profile", "--device", "--format", "--case", "--limit", "--jobs", "--report")
"""Options of the command that a value follows."""
_OF_GPU = ("gpu", "compute_capability", "driver")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIDING = {"", "-1"}
"""Values by which no GPU is seen."""

_SERVING = {wish.value: {item.value for item in precisions} for wish, precisions in WISHES.items()}
"""Last word of a case's id → the precisions of which one must be declared for it to pass."""

_Disagreement = tuple[str, str, object]
"""What is wrong: its name, the rule, and the value there."""


def disagreements(document: Mapping[str, Any]) -> Iterator[_Disagreement]:
    """Yield (name, rule, value) of all that contradicts another place of a document.

    Args:
        document: One of the right shape, whose conclusions follow from its results.
    """
    yield from _of_names(document)
    yield from _of_command(document)
    yield from _of_device(document)
    yield from _of_overrides(document)
    yield from _of_manifest(document)


def _of_names(document: Mapping[str, Any]) -> Iterator[_Disagreement]:
    name, manifest = document["subject"]["name"], document["manifest"]
    told = manifest.get("name")
    is_made = ":" in name  # module:function, which may call what it makes anything
    if told is None and document["standing"] != "failed":
        yield "manifest.name", "there, because what was judged was loaded", told
    elif told not in {None, name} and not is_made:
        yield "manifest.name", f"subject.name, {name!r}", told
    defined, package = manifest.get("class"), document["source"].get("package")
    if None not in {defined, package} and str(defined).partition(".")[0] != package:
        yield "source.package", f"that of manifest.class, {defined!r}", package


def _of_command(document: Mapping[str, Any]) -> Iterator[_Disagreement]:
    """Yield where the words that repeat a run would not repeat this one; the words of another program say nothing."""
    subject, run = document["subject"], document["run"]
    words = run["command"]
    if words[: len(_OURS)] != _OURS:
        return
    name, options = _parsed(words[len(_OURS) :])
    due: list[tuple[str, Sequence[str], Sequence[str]]] = [
        ("subject.name", [subject["name"]], name),
        ("subject.device", [subject["device"]], options["--device"] or ["cpu"]),
        ("run.only", run["only"], options["--case"]),
    ]
    # What was not asked for is chosen by the kit, and may be anything.
    for key, value, option in (
        ("subject.profile", [subject["profile"]], "--profile"),
        ("subject.formats", subject["formats"], "--format"),
        ("run.case_seconds", [f"{run['case_seconds']:g}"], "--limit"),
        ("run.processes", [str(run["processes"])], "--jobs"),
    ):
        if options[option]:
            due.append((key, value, list(dict.fromkeys(options[option]))))
    for key, value, told in due:
        if list(value) != list(told):
            shown = " ".join(map(str, value)) or "nothing"
            yield "run.command", f"one that asks for {key}, {shown}", " ".join(told) or "nothing"
    if not run["partial"] and (options["--format"] or options["--case"]):
        yield "run.partial", "true, because run.command chooses formats or cases", False


def _parsed(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names and the values of the options."""
    names: list[str] = []
    options: dict[str, list[str]] = {option: [] for option in _OPTIONS}
    left = iter(words)
    for word in left:
        if word in options:
            options[word].append(next(left, ""))
        elif not word.startswith("--"):
            names.append(word)
    return names, options


def _of_device(document: Mapping[str, Any]) -> Iterator[_Disagreement]:
    asked, device = document["subject"]["device"], document["device"]
    if device["device"] != asked:
        yield "device.device", f"subject.device, {asked!r}", device["device"]
    if asked.partition(":")[0] != "cuda":
        for name in _OF_GPU:
            if device.get(name) is not None:
                yield f"device.{name}", f"null, because {asked!r} is no GPU", device[name]
        return
    if document["kind"] == "certificate" and not device.get("gpu"):
        yield "device.gpu", f"the name of the GPU, because it certifies {asked!r}", device.get("gpu")
    hidden = document["run"]["environment"].get(_VISIBLE)
    if device.get("gpu") and hidden in _HIDING:
        yield f"run.environment.{_VISIBLE}", f"one that shows {device['gpu']!r}", hidden


def _of_overrides(document: Mapping[str, Any]) -> Iterator[_Disagreement]:
    """Yield the overrides that the kit would have refused to run by."""
    for section, is_known in (("overrides", False), ("known_failures", True)):
        for number, item in enumerate(document[section]):
            name = f"{section}[{number}]"
            try:
                made = Override(**item)
            except ConfigError as error:
                yield f"{name}.{error.name}", error.rule or "an override", error.value
                continue
            if made.is_known_failure != is_known:
                yield f"{name}.is_known_failure", str(is_known).lower(), made.is_known_failure
            if made.bound > 1.0 and document["subject"]["profile"] != "kernel":
                yield f"{name}.bound", "1 where no backend was judged", made.bound


def _of_manifest(document: Mapping[str, Any]) -> Iterator[_Disagreement]:
    """Yield what passed although the manifest of the backend does not declare it: the kit would not have run it."""
    if document["subject"]["profile"] != "kernel":
        return
    declared = document["manifest"].get("capabilities")
    if declared is None:
        if document["standing"] != "failed":
            yield "manifest.capabilities", "there, because what was judged was loaded", declared
        return
    formats, precisions = set(declared["formats"]), set(declared["precisions"])
    for result in document["results"]:
        if result["outcome"] != Outcome.PASS.value:
            continue
        case, kind = result["case"], format_of(result["case"])
        if kind != NO_FORMAT and not formats & {EVERY_FORMAT, kind}:
            yield "manifest.capabilities.formats", f"with {kind}, of which {case} passed", sorted(formats)
        ran = {path.rpartition("/")[2] for path in result.get("paths", ())}
        serving = _SERVING.get(case.rpartition("/")[2])
        if ran - precisions or (serving is not None and not serving & precisions):
            needed = ", ".join(sorted(ran - precisions or serving or ()))
            yield "manifest.capabilities.precisions", f"with {needed}, in which {case} passed", sorted(precisions)
