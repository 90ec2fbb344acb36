"""Places of a checkpoint's layers in a model that transformers has just built on the meta device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

import q4core as q4
from q4_nn.convert.reads import weight_reads
from q4_transformers.experts import are_experts, is_fused, place_experts
from q4_transformers.reasons import ABSENT, Reasons
from q4core import CheckpointError, ConfigError, Problem, SchemaError
from q4core.plugin_api import FLOATS, closest_name, counted, read_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from q4_transformers.config import Q4Config
    from q4_transformers.names import Names
    from q4core import Checkpoint

__all__ = [
    "Place",
    "fitting_problem",
    "open_files",
    "places_of_dense",
    "places_of_layers",
    "raise_unfit",
    "shape_of",
    "skipped_modules",
]

_INDEX = ".safetensors.index.json"
_LIKE_OTHERS = "in the checkpoint, as other experts of that layer are"
_PLAIN = ("FalconLinear",)
"""Subclasses of ``nn.Linear`` that compute what it computes, by a forward pass of their own."""
_EXPERTS = 3
"""Dimensions of a tensor that holds a matrix for each expert."""


@attrs.frozen
class Place:
    """A layer of the checkpoint, and the module of the model that it fills.

    Args:
        stored: Name of the layer, or of the dense tensor.
        module: Path of the module.
        expert: Which matrix of a dense tensor of experts it is, ``[E, …]``.
        transposed: Whether a dense matrix is stored as [K, N].
        saved: Name of an expert's layer in a checkpoint that holds it packed.
    """

    stored: str
    module: str
    expert: int | None = None
    transposed: bool = False
    saved: str | None = None

    @property
    def name(self) -> str:
        """Name of the layer in a checkpoint that holds it packed."""
        return self.saved or self.stored.removesuffix(".weight")


def open_files(files: Sequence[str] | None) -> Checkpoint:
    """Open the checkpoint that transformers resolved: one safetensors file, or the shards of one index.

    Raises:
        CheckpointError: It is of another type, or malformed; a shard is missing.
        SchemaError: Something is wrong with its layers.
    """
    paths = [Path(name) for name in files or ()]
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        hint = "Save the model as safetensors; a GGUF file is loaded by q4_transformers.load(path)."
        found = paths[0].name if paths else "a state dict"
        raise CheckpointError("checkpoint", name="files", rule="safetensors files", value=found, hint=hint)
    if len(paths) == 1:
        return q4.open(paths[0])
    folder, names = paths[0].parent, {path.name for path in paths}
    for index in sorted(folder.glob(f"*{_INDEX}*")):
        if names <= set(read_object(index, "index").get("weight_map", {}).values()):
            return q4.open(index)
    raise CheckpointError(
        "checkpoint", name="index", rule=f"next to its {counted(len(names), 'shard')}", where=str(folder)
    )


def shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (N, K) of a module that a packed layer can replace, or None.

    It can't for a subclass with a forward pass of its own (routers), nor where a parent reads the weight (attention of
    torch).
    """
    if isinstance(module, Conv1D):
        return module.nf, module.nx  # GPT-2's, stored transposed
    kind = type(module)
    is_plain = kind.__name__ in _PLAIN or getattr(kind, "forward", None) is nn.Linear.forward
    is_called = not isinstance(module, NonDynamicallyQuantizableLinear)
    if not (isinstance(module, nn.Linear) and is_plain and is_called):
        return None
    rows, columns = int(module.out_features), int(module.in_features)  # a model's config may have made them tensors
    return (rows, columns) if rows and columns else None


def places_of_layers(
    model: Any, checkpoint: Checkpoint, names: Names, config: Q4Config
) -> tuple[list[Place], dict[str, str], dict[str, str]]:
    """Return the place of every packed layer, why layers are dense, and parameter → the layer dequantised for it.

    Those are packed embeddings, what ``modules_to_not_convert`` names, and what ``skip`` leaves out.

    Raises:
        SchemaError: A layer has no place in the model, has another shape there, or lacks its bias; or a layer is in a
            dialect that is not read, or of 8 bits. Everything is named at once.
    """
    problems = [*checkpoint.schema.unsupported, *_cast_problems(checkpoint, names)]
    places: dict[str, Place] = {}
    decoded: dict[str, str] = {}
    reasons: dict[str, str] = {}
    readable: list[str] = []
    experts, missing = place_experts(model, checkpoint.schema.layers, names)
    problems += [Problem("missing_key", path, _LIKE_OTHERS) for path in missing]
    modules = dict(model.named_modules())
    skipped = skipped_modules(model, config.modules_to_not_convert or ())
    stored_dense = {names.rename(name) for name in checkpoint.dense}
    reads = weight_reads(model)
    for stored, layer in checkpoint.schema.layers.items():
        name = experts.get(stored) or (names.rename(f"{stored}.weight") or "").removesuffix(".weight")
        module = modules.get(name)
        tied = model.all_tied_weights_keys.get(f"{name}.weight")
        problem = fitting_problem(stored, layer.shape, name, modules, type(model).__name__)
        reason = skipped.get(name)
        if module is None:
            pass
        elif problem is not None:
            is_skipped = config.skip is not None or isinstance(module, nn.Embedding)
            reason = reason or (f"{type(module).__name__} is no plain linear layer" if is_skipped else None)
        elif tied is not None:
            problem = Problem("unsupported", stored, f"dense, as the config ties it to {tied}", layer.dialect)
        elif name in reads and reads[name].is_change and reads[name].is_reached:
            problem = Problem("unsupported", stored, f"dense, as {reads[name].reason}", layer.dialect)
            reason = reason or (reads[name].reason if config.skip else None)
        elif module.bias is not None and f"{name}.bias" not in stored_dense:
            problem = Problem("missing_key", f"{stored}.bias", "there, as the model's config has a bias")
        elif name in places:
            problem = Problem("unknown_key", stored, f"the only layer for {name}", places[name].stored)
        fits = _takes_dense(module, layer.shape) and (problem is None or problem.code == "unsupported")
        if fits and tied is None and reason is not None:
            decoded[f"{name}.weight"], reasons[name] = stored, f"{reason}: dequantised"
            continue
        if problem is not None:
            problems.append(problem)
            readable += [name] if fits and tied is None else []
        places[name] = Place(stored, name)
    raise_unfit(model, checkpoint, problems, readable)
    known = {*places, *model.all_tied_weights_keys, *stored_dense, *decoded}
    missing = [name for name, module in modules.items() if shape_of(module) and not known & {name, f"{name}.weight"}]
    return list(places.values()), reasons | dict.fromkeys(missing, ABSENT), decoded


def _takes_dense(module: nn.Module | None, shape: tuple[int, int] | None) -> bool:
    """Return whether a module has a weight of a layer's shape [N, K]."""
    weight = getattr(module, "weight", None)
    found = () if weight is None else tuple(weight.shape)
    return shape is not None and found == (shape[::-1] if isinstance(module, Conv1D) else tuple(shape))


def _cast_problems(checkpoint: Checkpoint, names: Names) -> Iterator[Problem]:
    """Yield each dense tensor of 8 bits, which transformers would cast without its scales."""
    for name, info in checkpoint.dense.infos.items():
        if info.dtype.itemsize == 1 and names.is_float(names.rename(name)):
            rule = "of 16 bits or more, as transformers would cast it without its scales"
            yield Problem("dtype", name, rule, str(info.dtype).removeprefix("torch."))


def places_of_decoded(model: Any, checkpoint: Checkpoint, names: Names, packed: Collection[str]) -> dict[str, str]:
    """Return parameter → the dense tensor that is decoded for it, as transformers would cast it without its scales.

    Raises:
        SchemaError: The model has no parameter of that name and shape: it merges the tensor with others, say.
    """
    found, problems = {}, []
    for stored in checkpoint.schema.decoded:
        name = names.rename(stored)
        shape = names.shape(name)
        if stored not in packed and shape != checkpoint.dense.infos[stored].shape:
            rule = f"a parameter of {type(model).__name__} of that shape, to be decoded into"
            problems.append(Problem("unsupported", stored, rule, None if shape is None else list(shape)))
        elif stored not in packed and name is not None:
            found[name] = stored
    raise_unfit(model, checkpoint, problems)
    return found


def fitting_problem(
    stored: str, shape: tuple[int, int] | None, name: str, modules: Mapping[str, nn.Module], model: str
) -> Problem | None:
    """Return why the module of a name can't take a packed layer of some shape, or None."""
    module = modules.get(name)
    if module is None:
        close = closest_name(stored, modules)
        rule = f"a module of {model}" + (f"; did it mean {close!r}?" if close else "")
        return Problem("unknown_key", stored, rule)
    own = shape_of(module)
    if own is None:
        rule = "a linear layer in the model, as packed weights run in no other"
        return Problem("unsupported", stored, rule, type(module).__name__)
    if shape is not None and own != tuple(shape):
        return Problem("shape", stored, f"{list(own)}, as in the model's config", list(shape))
    return None


def raise_unfit(model: Any, checkpoint: Checkpoint, problems: Sequence[Problem], readable: Sequence[str] = ()) -> None:
    """Raise the error that names every problem of a checkpoint with a model, if there is one.

    Args:
        model: The model.
        checkpoint: The checkpoint.
        problems: What is wrong.
        readable: Modules whose problem is solved where their weights are dequantised.

    Raises:
        SchemaError: There is.
    """
    if not problems:
        return
    what, hint = f"checkpoint does not fit {type(model).__name__}: {counted(len(problems), 'problem')}", None
    kinds = Counter(str(problem.value) for problem in checkpoint.schema.unsupported)
    if kinds:
        listed = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
        what = f"{what}, of which {kinds.total()} can't be read: {listed}"
        hint = "Load the model's dense checkpoint with Q4Config(format='nf4')"
        hint += ", or make a GGUF file of Q4_K, Q6_K or Q8_0." if checkpoint.path.suffix == ".gguf" else "."
    elif readable:
        hint = (
            f"Q4Config(modules_to_not_convert={list(readable)}) loads them dense; skip='unsupported' does so for all."
        )
    raise SchemaError(what, where=str(checkpoint.path), problems=problems, schema=checkpoint.schema, hint=hint)


def places_of_dense(
    model: Any, checkpoint: Checkpoint, names: Names, config: Q4Config
) -> tuple[list[Place], dict[str, str]]:
    """Return the place of every dense weight to quantise, and why each other linear layer stays as it is.

    Raises:
        ConfigError: A name of ``modules_to_not_convert`` fits no module.
        SchemaError: The checkpoint has some experts of a layer, and not all; or it is of 8 bits.
    """
    raise_unfit(model, checkpoint, list(_cast_problems(checkpoint, names)))
    stored: dict[str, str] = {}
    others: dict[str, str] = {}
    infos: Mapping[str, Any] = checkpoint.dense.infos
    for key, info in infos.items():
        name = names.rename(key)
        if name is not None and info.dtype in FLOATS:
            stored[name] = key
        elif name is not None:
            others[name] = f"of {str(info.dtype).removeprefix('torch.')}, which is not quantised"
    why = Reasons(model, config, stored, others, weight_reads(model))
    skipped = skipped_modules(model, config.modules_to_not_convert)
    for name, module in model.named_modules():
        if name not in skipped and are_experts(module) and (reason := why.of_experts(module)):
            skipped[name] = reason
    experts = _dense_experts(model, checkpoint, names, skipped)
    places, reasons = list(experts.values()), {}
    for name, module in model.named_modules():
        if name in experts or not (isinstance(module, nn.Linear | Conv1D) or (name in skipped and are_experts(module))):
            continue
        reason = skipped.get(name) or why.of_linear(name, module, shape_of(module))
        if reason is None:
            places.append(Place(stored[f"{name}.weight"], name, transposed=isinstance(module, Conv1D)))
        else:
            reasons[name] = reason
    return places, reasons


def _dense_experts(model: Any, checkpoint: Checkpoint, names: Names, skipped: Collection[str]) -> dict[str, Place]:
    """Make linear layers for experts, and return the place of each by its path."""
    found: dict[str, tuple[str, int | None]] = {}
    infos: Mapping[str, Any] = checkpoint.dense.infos
    for key, info in infos.items():
        if info.dtype in FLOATS and len(info.shape) == _EXPERTS:
            # GraniteMoE's files call them input_linear and output_linear
            name = key if is_fused(key) else names.rename(key) or key
            found |= {f"{name}.{expert}": (key, expert) for expert in range(info.shape[0])}
        elif info.dtype in FLOATS:
            found[key.removesuffix(".weight")] = key, None
    experts, missing = place_experts(model, found, names, skipped, is_dense=True)
    raise_unfit(model, checkpoint, [Problem("missing_key", path, _LIKE_OTHERS) for path in missing])
    places = {}
    for name, path in experts.items():
        key, expert = found[name]
        turned = expert is not None and model.get_submodule(path.rsplit(".", 2)[0]).is_transposed
        places[path] = Place(key, path, expert, transposed=turned, saved=name)
    return places


def skipped_modules(model: Any, wanted: Sequence[str] | None) -> dict[str, str]:
    """Return why modules are left dense by the caller's names, or by transformers' own custom where there are none.

    Raises:
        ConfigError: A name fits no module.
    """
    modules = dict(model.named_modules())
    if wanted is None:
        head = model.get_output_embeddings()
        return {name: "the output head, by default" for name, module in modules.items() if module is head}
    found: dict[str, str] = {}
    for given in wanted:
        hits = [name for name in modules if name == given or name.endswith(f".{given}")]
        if not hits:
            close = closest_name(given, _parts(modules))
            hint = f"Did you mean {close!r}?" if close else None
            rule = "names of modules of the model"
            raise ConfigError("Q4Config", name="modules_to_not_convert", rule=rule, value=given, hint=hint)
        inside = [name for name in modules for hit in hits if name == hit or name.startswith(f"{hit}.")]
        found |= dict.fromkeys(inside, f"in modules_to_not_convert as {given!r}")
    return found


def _parts(modules: Iterable[str]) -> set[str]:
    return {part for name in modules for part in (name, name.rpartition(".")[2]) if part}
