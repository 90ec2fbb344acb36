"""``q4 doctor``: versions, devices, plugins with state and error, and the abilities of each backend here."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import warnings
from typing import TYPE_CHECKING, Any

import attrs
import torch
import typer

import q4core as q4
from q4_cli import values
from q4_cli.doctor_report import environment_facts, survey_backends, unknown_formats, versions
from q4_cli.output import bytes_text, open_output, say, say_path
from q4_cli.trial import shut_out, try_commands, try_plugins
from q4core.memory import availability
from q4core.plugin_api import Proofs, names_of_plugins, resolve_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rich.console import Console

__all__ = ["doctor"]

_LABEL = 18
_BROKEN = q4.ReasonCode.PLUGIN_ERROR
_STATE_STYLES = {"loaded": "green", "failed": "red", "disabled": "yellow", "unknown": "red"}
_WORDS = {"all": ("serves", "green"), "some": ("partly", "yellow"), "none": ("no", "red")}


def doctor(
    *,
    device: str | None,
    dtype: str | None,
    strict: bool,
    proofs: bool,
    as_json: bool,
) -> None:
    """Show what is installed, what this machine has, and what each backend can do with each format here."""
    config = q4.SessionConfig(device=device, compute_dtype=values.parse_dtype(dtype))
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), open_output(as_json=as_json) as output:
        warnings.simplefilter("ignore", q4.Q4PluginWarning)  # what is wrong with plugins is in the answer
        facts = q4.machine_facts()
        devices = [torch.device("cpu"), *(torch.device("cuda", item.index) for item in facts.cuda_devices)]
        if device not in {None, "auto"}:
            devices = [resolve_device(config, torch.device("cpu"))]
        variables, problems = environment_facts()
        problems += try_commands()
        with output.progress("trying plugins", len(names_of_plugins(os.environ))) as step:
            hung = try_plugins(devices, config.compute_dtype, step)
        stack.enter_context(shut_out([*hung]))
        registry = q4.default_registry()
        verdicts = survey_backends(registry, devices, config.compute_dtype)
        problems += unknown_formats(registry)
        record: dict[str, Any] = {
            "versions": versions(registry),
            "machine": facts,
            "plugins": [],
            "formats": sorted(registry.formats()),
            "dialects": sorted(item.name for item in q4.dialects(registry)),
            "checkpoint_readers": [*registry.items("q4_checkpoint_readers")],
            "architectures": [*registry.items("q4_architectures")],
            "layer_types": [*registry.items("q4_layers")],
            "memory_providers": [provider.name for provider in registry.memory_providers()],
            "memory": [
                {"provider": provider.name, "device": str(place), **attrs.asdict(availability(provider, place))}
                for provider in registry.memory_providers()
                for place in devices
            ],
            "backends": [
                *(
                    {"name": name, "state": "serves", "api_version": one.api_version, "capabilities": one.capabilities}
                    for name, one in registry.backends().items()
                ),
                *(
                    {"name": item.name, "state": "refused", "plugin": item.plugin, "reason": item.reason}
                    for item in registry.invalid_backends()
                ),
                *(
                    {"name": name, "state": "refused", "plugin": name, "reason": q4.Reason(_BROKEN, error)}
                    for name, error in hung.items()
                ),
            ],
            "verdicts": verdicts,
            "environment": variables,
        }
        stored = Proofs.here(registry) if proofs else None
        record["proofs"] = [] if stored is None else [attrs.asdict(item) for item in stored.files()]
        # Last, after every hook was called.
        plugins = [
            attrs.evolve(item, state="failed", errors=[hung[item.name]]) if item.name in hung else item
            for item in registry.records()
        ]
        broken = [f"plugin {item.name!r}: {error}" for item in plugins for error in item.errors]
        record |= {"plugins": plugins, "plugin_errors": broken, "problems": [*problems, *broken]}
        output.answer(record, lambda console: _show(console, record, problems))
        if strict and broken:
            raise typer.Exit(1)


def _show(console: Console, record: Mapping[str, Any], problems: Iterable[str]) -> None:
    _show_lines(console, "Versions", record["versions"].items())
    _show_lines(console, "Machine", _machine_lines(record["machine"]))
    _show_plugins(console, record)
    _show_verdicts(console, record)
    if record["proofs"]:
        _show_lines(console, "Proofs", _proof_lines(record["proofs"]))
    if record["environment"]:
        _show_lines(console, "Environment", record["environment"].items())
    for problem in problems:
        say(console, (problem, "red"), label=("problem ", "red"))
    broken = sum(1 for plugin in record["plugins"] if plugin.errors)
    if broken:
        say(console, (f"{broken} of {len(record['plugins'])} plugins broken, see above", "bold red"))
    elif not record["problems"]:
        say(console)
        say(console, ("No problems", "bold green"))


def _show_heading(console: Console, text: str) -> None:
    say(console)
    say(console, (text, "bold"))


def _show_lines(console: Console, heading: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values under a heading, the values below one another."""
    if heading:
        _show_heading(console, heading)
    listed = list(rows)
    width = max([_LABEL, *(len(name) for name, _ in listed)])
    for name, value in listed:
        say(console, value, label=f"  {name:<{width}}  ")


def _machine_lines(facts: q4.MachineFacts) -> Iterator[tuple[str, str]]:
    yield "system", f"{facts.system}, {facts.machine}"
    yield "processor", f"{facts.processor} ({facts.cpu_count} CPUs, {facts.torch_threads} torch threads)"
    yield "features", " ".join(facts.cpu_features) or "none known"
    if facts.memory_available_bytes is not None:
        yield "memory", f"{bytes_text(facts.memory_available_bytes)} available"
    if not facts.cuda_devices:
        built = f"torch is built for CUDA {facts.cuda_version}" if facts.cuda_version else "torch is built without CUDA"
        yield "cuda", f"no device ({built})"
    for item in facts.cuda_devices:
        version, size = ".".join(map(str, item.capability)), bytes_text(item.total_memory_bytes)
        end = ", integrated" if item.is_integrated else ""
        yield f"cuda:{item.index}", f"{item.name}, compute capability {version}, {size}{end}"


def _show_plugins(console: Console, record: Mapping[str, Any]) -> None:
    _show_heading(console, "Plugins")
    if not record["plugins"]:
        say(console, ("none: not even the reference; install the package q4-dequant-fallback", "red"), label="  ")
    width = max([_LABEL, *(len(plugin.name) for plugin in record["plugins"])])
    for plugin in record["plugins"]:
        style = "red" if plugin.errors else _STATE_STYLES[plugin.state]
        say(console, (f"{plugin.state:<8}", style), f"  {plugin.source}", label=f"  {plugin.name:<{width}}  ")
        for error in plugin.errors:
            say(console, (error, "red"), label=" " * (width + 4))
    kinds = ("dialects", "checkpoint_readers", "architectures", "layer_types", "memory_providers")
    _show_lines(console, "", [(kind.replace("_", " "), ", ".join(record[kind]) or "none") for kind in kinds])
    for item in record["memory"]:
        word = "unified memory" if item["is_available"] else "no unified memory"
        say(console, f"{word} for {item['device']}: {item['reason']}", label=f"  {item['provider']:<{_LABEL}}  ")


def _proof_lines(files: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for item in files:
        day = dt.datetime.fromtimestamp(item["written"], tz=dt.timezone.utc).date()
        use = "in use" if item["is_current"] else "of another build, machine or setting"
        damaged = f", {item['damaged']} damaged lines" if item["damaged"] else ""
        yield item["backend"], f"{item['count']} kinds{damaged}, {use}, last on {day}: {item['path']}"


def _show_verdicts(console: Console, record: Mapping[str, Any]) -> None:
    devices: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for item in record["verdicts"]:
        devices.setdefault(item["device"], {}).setdefault(item["backend"], []).append(item)
    for device, backends in devices.items():
        dtype = next(iter(backends.values()))[0]["dtype"]
        _show_heading(console, f"What runs on {device} (a 4096×4096 layer, x {dtype})")
        for backend, verdicts in backends.items():
            _show_backend(console, backend, verdicts)
    if not devices:
        say(console, ("No backend can run here", "bold red"))
    failed = {plugin.name for plugin in record["plugins"] if plugin.state == "failed"}
    for item in record["backends"]:
        if item["state"] == "refused" and item["name"] not in failed:
            say(console, (f"refused: {item['reason']}", "red"), label=f"  {item['name']}  ")


def _show_backend(console: Console, backend: str, verdicts: list[Mapping[str, Any]]) -> None:
    """Print what one backend does on one device, formats with the same answer together."""
    states = dict.fromkeys(item["native_load_state"] for item in verdicts)
    known = ", ".join(state for state in states if state != "not asked")
    say(console, (backend, "bold"), f"  {known}", label="  ")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for item in verdicts:
        reasons = [(reason["code"], _general(reason["message"], item)) for reason in item["reasons"]]
        groups.setdefault(repr((item["serves"], item["paths"], reasons)), []).append(item)
    for group in groups.values():
        head = group[0]
        word, style = _WORDS[head["serves"]]
        say(console, " ".join(item["format"] for item in group), label=(f"    {word:<7}", style))
        for path in head["paths"]:
            say_path(console, path, label=" " * 11)
        for reason in head["reasons"]:
            message = _general(reason["message"], head) if len(group) > 1 else reason["message"]
            say(console, (message, "dim"), label=(f"{' ' * 11}{reason['code']}: ", "dim"))


def _general(message: str, verdict: Mapping[str, Any]) -> str:
    """Return a reason without the format's own name, so that equal reasons are shown once."""
    return message.replace(repr(verdict["format"]), "…")
