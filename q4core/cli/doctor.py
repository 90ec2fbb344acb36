"""``q4 doctor``: versions, devices, plugins with state and error, and what each backend can do here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.text import Text

from q4core.cli import options
from q4core.cli.output import clean, open_output
from q4core.cli.survey import ServiceVerdict, environment_facts, survey_backends, versions
from q4core.cli.table import bytes_text
from q4core.dialects_simple import SIMPLE_DIALECTS
from q4core.preparation import resolve_device
from q4core.registry import default_registry
from q4core.runtime import MachineFacts, machine_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from q4core.registry import Registry
    from q4core.runtime import CudaDevice

__all__ = ["doctor"]

_LABEL = 14


def doctor(
    *,
    device: options.Device = None,
    dtype: options.Dtype = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a plugin is broken.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what is installed, what this machine has, and what each backend can do with each format here."""
    with open_output(as_json=as_json) as output:
        config = options.make_config(device=device, dtype=dtype)
        registry = default_registry()
        facts = machine_facts()
        devices = _devices(facts, config, asked=device not in {None, "auto"})
        verdicts = survey_backends(registry, devices, config.compute_dtype)
        variables, problems = environment_facts()
        record = {
            "versions": versions(registry),
            "machine": facts,
            "plugins": registry.records(),
            "formats": sorted(registry.formats()),
            "dialects": sorted({item.name for item in (*SIMPLE_DIALECTS, *registry.dialects())}),
            "checkpoint_readers": [reader.name for reader in registry.checkpoint_readers()],
            "memory_providers": [provider.name for provider in registry.memory_providers()],
            "backends": _backends(registry),
            "verdicts": verdicts,
            "environment": variables,
            "problems": [*problems, *_plugin_problems(registry)],
        }
        output.answer(record, lambda console: _show(console, record, facts))
        if strict and _plugin_problems(registry):
            raise typer.Exit(1)


def _devices(facts: MachineFacts, config: Any, *, asked: bool) -> list[torch.device]:
    if asked:
        return [resolve_device(config, torch.device("cpu"))]
    return [torch.device("cpu"), *(torch.device("cuda", item.index) for item in facts.cuda_devices)]


def _plugin_problems(registry: Registry) -> list[str]:
    return [f"plugin {record.name!r}: {error}" for record in registry.records() for error in record.errors]


def _backends(registry: Registry) -> list[dict[str, Any]]:
    serving = [
        {
            "name": name,
            "state": "serves",
            "api_version": backend.api_version,
            "capabilities": {
                "formats": backend.capabilities.formats,
                "scale_kinds": backend.capabilities.scale_kinds,
                "packings": [str(packing) for packing in sorted(backend.capabilities.packings, key=str)],
                "devices": backend.capabilities.devices,
                "dtypes": backend.capabilities.dtypes,
                "precisions": backend.capabilities.precisions,
                "features": backend.capabilities.features,
                "ops": backend.capabilities.ops,
            },
        }
        for name, backend in registry.backends().items()
    ]
    refused = [
        {"name": item.name, "state": "refused", "plugin": item.plugin, "reason": item.reason}
        for item in registry.refused_backends()
    ]
    return [*serving, *refused]


def _show(console: Console, record: Mapping[str, Any], facts: MachineFacts) -> None:
    _heading(console, "Versions")
    _lines(console, [(name, version, "") for name, version in record["versions"].items()])
    _heading(console, "Machine")
    _lines(console, _machine_lines(facts))
    _heading(console, "Plugins")
    _show_plugins(console, record)
    _show_verdicts(console, record["verdicts"], [item for item in record["backends"] if item["state"] == "refused"])
    if record["environment"]:
        _heading(console, "Environment")
        _lines(console, [(name, value, "") for name, value in record["environment"].items()], label=20)
    _heading(console, "Problems" if record["problems"] else "No problems")
    for problem in record["problems"]:
        console.print(Text(f"  {clean(problem)}", style="red"), soft_wrap=True)


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def _lines(console: Console, rows: Sequence[tuple[str, str, str]], *, label: int = _LABEL) -> None:
    width = max([label, *(len(name) + 2 for name, _, _ in rows)])
    for name, value, style in rows:
        console.print(_hanging(f"  {name:<{width}}", clean(value), style, console.width))


def _hanging(label: str, value: str, style: str, width: int) -> Text:
    """Return label and value, the value's further lines indented under its first."""
    room = max(24, width - len(label))
    lines = [""]
    for word in value.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    text = Text(label, style="", overflow="fold")
    text.append(f"\n{' ' * len(label)}".join(lines), style=style)
    return text


def _machine_lines(facts: MachineFacts) -> list[tuple[str, str, str]]:
    rows = [
        ("system", f"{facts.system}, {facts.machine}", ""),
        ("processor", f"{facts.processor} ({facts.cpu_count} CPUs, {facts.torch_threads} torch threads)", ""),
        ("features", " ".join(facts.cpu_features) or "none known", ""),
    ]
    if facts.memory_available_bytes is not None:
        rows.append(("memory", f"{bytes_text(facts.memory_available_bytes)} available", ""))
    if not facts.cuda_devices:
        built = f"torch is built for CUDA {facts.cuda_version}" if facts.cuda_version else "torch is built without CUDA"
        rows.append(("cuda", f"no device ({built})", ""))
    rows.extend(
        (
            f"cuda:{item.index}",
            _describe_cuda(item),
            "",
        )
        for item in facts.cuda_devices
    )
    return rows


def _describe_cuda(item: CudaDevice) -> str:
    version = ".".join(map(str, item.capability))
    end = ", integrated" if item.is_integrated else ""
    return f"{item.name}, compute capability {version}, {bytes_text(item.total_memory_bytes)}{end}"


_STATE_STYLES = {"loaded": "green", "failed": "red", "disabled": "yellow"}


def _show_plugins(console: Console, record: Mapping[str, Any]) -> None:
    if not record["plugins"]:
        console.print(Text("  none: not even the reference; pip install q4-dequant-fallback", style="red"))
    for plugin in record["plugins"]:
        style = "red" if plugin.errors else _STATE_STYLES[plugin.state]
        line = Text.assemble(f"  {clean(plugin.name):<20} ", (f"{plugin.state:<9}", style), f" {clean(plugin.source)}")
        console.print(line, soft_wrap=True)
        for error in plugin.errors:
            console.print(_hanging(" " * 23, clean(error), "red", console.width))
    for kind in ("dialects", "checkpoint_readers", "memory_providers"):
        names = ", ".join(record[kind]) or "none"
        _lines(console, [(kind.replace("_", " "), names, "")], label=21)


def _show_verdicts(console: Console, verdicts: Sequence[ServiceVerdict], refused: Sequence[Mapping[str, Any]]) -> None:
    for device in dict.fromkeys(item.device for item in verdicts):
        here = [item for item in verdicts if item.device == device]
        _heading(console, f"What runs on {device} (a 4096×4096 layer, x {here[0].dtype})")
        for backend in dict.fromkeys(item.backend for item in here):
            _show_backend(console, backend, [item for item in here if item.backend == backend])
    if not verdicts:
        _heading(console, "No backend may serve")
    for item in refused:
        console.print(_hanging(f"  {clean(item['name'])}: ", f"refused: {clean(item['reason'])}", "red", console.width))


def _show_backend(console: Console, backend: str, verdicts: Sequence[ServiceVerdict]) -> None:
    """Print what one backend does on one device, formats with the same answer together."""
    states = ", ".join(dict.fromkeys(item.native_state for item in verdicts if item.native_state != "not asked"))
    console.print(Text.assemble("  ", (clean(backend), "bold"), f"  {clean(states)}"), soft_wrap=True)
    groups: dict[str, list[ServiceVerdict]] = {}
    for item in verdicts:
        same = repr((item.serves, item.paths, [{**r, "message": _general(r["message"], item)} for r in item.reasons]))
        groups.setdefault(same, []).append(item)
    for group in groups.values():
        head = group[0]
        word, style = {"all": ("serves", "green"), "some": ("partly", "yellow"), "none": ("no", "red")}[head.serves]
        names = " ".join(item.format for item in group)
        console.print(Text.assemble("    ", (f"{word:<7}", style), clean(names)), soft_wrap=True)
        for path in head.paths:
            low, high = path["m"]
            span = f"M {low}…{'∞' if high is None else high}"
            line = f"{span:<12} {clean(path['name'])}  {path['kind']}, {path['precision']}, tier {path['tier']}"
            console.print(Text(f"           {line}"), soft_wrap=True)
        for reason in head.reasons:
            message = _general(reason["message"], head) if len(group) > 1 else reason["message"]
            console.print(_hanging(" " * 11, f"{reason['code']}: {clean(message)}", "dim", console.width))


def _general(message: str, verdict: ServiceVerdict) -> str:
    """Return a reason without the format's own name, so that equal reasons are told once."""
    return message.replace(repr(verdict.format), "…")
