"""``Q4Quantizer``: the quantizer that transformers calls while it loads a model, and when it saves one.

transformers builds the model on the meta device, and calls us before it reads a tensor. We read the headers, reject
what does not fit, and replace each layer to pack by an empty one. transformers then loads what is dense, and
finds no place for the packed tensors, which it does not read. Afterwards each layer adopts its weight from our own
mapping of the files, one at a time.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

import q4core as q4
from q4_nn.convert.reads import weight_reads
from q4_transformers.dense import fill_parameter, hide_parameter, make_dense, plain_layer
from q4_transformers.encoders import run_encoders_as_programs
from q4_transformers.experts import are_experts, drop_conversions, has_experts, place_experts, without_experts
from q4_transformers.linear import HfLinear
from q4_transformers.names import Names
from q4_transformers.parallelism import Ranks, check_heads, find_ranks
from q4_transformers.peft import keep_names_of_experts
from q4_transformers.places import Place, open_files, places_of_decoded, places_of_dense, places_of_layers, shape_of
from q4_transformers.reasons import block_size_for
from q4_transformers.saving import state_and_metadata
from q4_transformers.split import SplitLinear, split_style
from q4core import ConfigError, InputError
from q4core.plugin_api import read_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_transformers.caching import LayerCache
    from q4_transformers.gguf import GgufFile
    from q4core import Checkpoint, PackedWeight

__all__ = ["Q4Quantizer"]

logger = logging.get_logger("q4_transformers")
_ROOM = "room"
"""Name of the buffer by which an empty layer counts while transformers looks for a device map."""


class Q4Quantizer(HfQuantizer):  # type: ignore[misc]  # transformers has no types here
    """transformers' view of a q4core model; see ``HfQuantizer`` for when each method is called."""

    requires_calibration = False

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # to transformers: what it loads itself is dense
        self.dialects: tuple[str, ...] = ()
        """The layers that were read; empty for a dense checkpoint."""
        self.entry: dict[str, Any] | None = None
        """The entry of config.json that was read."""
        self.reasons: dict[str, str] = {}
        """Module → why it is dense though a format was asked for."""
        self.cache_state = "off"
        """The state of the file in the cache: ``opened``, ``written``, ``off`` (as on GPUs) or why neither."""
        self._cache: LayerCache | None = None
        self._checkpoint: Checkpoint | None = None
        self._model: Any = None
        self._dtype: torch.dtype | None = None
        self._places: list[Place] = []
        self._decoded: dict[str, str] = {}
        self._dequantised: dict[str, tuple[str, list[tuple[nn.Module, str]]]] = {}
        self._rooms: list[HfLinear] = []
        self.packed: tuple[str, ...] = ()
        """The modules that were packed at load."""
        self._device_map: Any = None
        self._ranks: Ranks | None = None

    # -- before loading

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise an error for what is not supported; called again once ``device_map="auto"`` is resolved.

        Raises:
            ConfigError: A part of the model would lie on the disk, or on the CPU next to a GPU; or the model would be
                split over processes in a way that packed layers can't follow.
        """
        self._ranks = find_ranks()
        self._device_map = device_map
        if not isinstance(device_map, dict):
            return
        for layer in self._rooms:  # found by now
            del layer._buffers[_ROOM]  # noqa: SLF001  # our own
        self._rooms = []
        kinds = {"disk" if place == "disk" else torch.device(place).type for place in device_map.values()}
        if "disk" in kinds or len(kinds) > 1:
            rule = "on GPUs alone or on the CPU alone: packed layers are not moved for each call"
            hint = "Give more max_memory, or device_map='cpu'."
            raise ConfigError("from_pretrained", name="device_map", rule=rule, value=sorted(kinds), hint=hint)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, device_map: Any = None, dtype: Any = None, **_: Any
    ) -> None:
        config = self.quantization_config
        files = [config.gguf.path] if config.gguf is not None else [Path(name) for name in checkpoint_files or ()]
        if self._ranks is not None:
            check_heads(model.config, self._ranks)
        elif files and config.cache != "off" and self._is_on_cpu():
            from q4_transformers.caching import open_layers  # noqa: PLC0415  # for those who want it

            self._cache = open_layers(files, model, config, dtype)
        self._dtype = dtype
        checkpoint = open_files(checkpoint_files) if config.gguf is None else q4.open(config.gguf.path)
        dequantised: dict[str, str] = {}
        try:
            names = Names(model)
            _check_format(checkpoint, config.format)
            if config.gguf is not None:
                place_experts(model, config.gguf.experts, names)
                self._places, self.reasons = list(config.gguf.places), dict(config.gguf.reasons)
            elif config.format is None:
                self._places, self.reasons, dequantised = places_of_layers(model, checkpoint, names, config)
            else:
                self._places, self.reasons = places_of_dense(model, checkpoint, names, config)
                if not self._places:
                    _raise_nothing_packed(config.format, self.reasons, checkpoint)
            self._decoded = places_of_decoded(model, checkpoint, names, {place.stored for place in self._places})
            self._read_facts(checkpoint, is_changed=bool(self._decoded or dequantised))
            for parameter, stored in dequantised.items():
                self._dequantised[parameter] = stored, hide_parameter(model, parameter)
            if has_experts(model):
                keep_names_of_experts()
            self._replace(model, checkpoint, dtype, takes_place=isinstance(device_map, str))
            _hide(model, (form for key in self._packed_keys(checkpoint) for form in names.forms(key)))
        except BaseException:
            checkpoint.close()
            raise
        self._checkpoint, self._model = checkpoint, model

    def _is_on_cpu(self) -> bool:
        """Return whether every packed layer will lie on the CPU, as far as is known; others are not stored on disk."""
        places = self._device_map.values() if isinstance(self._device_map, dict) else ()
        return all(torch.device(place).type == "cpu" for place in places)

    def _read_facts(self, checkpoint: Checkpoint, *, is_changed: bool) -> None:
        """Store what saving needs: the dialects, and the checkpoint's entry of config.json, where it holds still."""
        self.dialects = checkpoint.schema.dialects
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        is_stated = self.dialects and self.quantization_config.gguf is None and not is_changed  # saved as dense
        found = read_config(folder).get("quantization_config") if is_stated else None
        self.entry = self.quantization_config.stored = found if isinstance(found, dict) else None

    def _packed_keys(self, checkpoint: Checkpoint) -> Iterable[str]:
        layers = checkpoint.schema.layers
        for place in self._places:
            yield from layers[place.stored].keys.values() if place.stored in layers else (place.stored,)
        for stored, _ in self._dequantised.values():
            yield from layers[stored].keys.values()
        for stored, layer in checkpoint.schema.decoded.items():
            yield from (key for key in layer.keys.values() if key != stored)

    def _replace(self, model: Any, checkpoint: Checkpoint, dtype: torch.dtype | None, *, takes_place: bool) -> None:
        """Put an empty layer in each place; it counts for its packed bytes where a device map is to be found."""
        config = self.quantization_config.session_config()
        reads = weight_reads(model)
        for place in self._places:
            module = model.get_submodule(place.module)
            rows, columns = shape_of(module) or (0, 0)
            options: Any = {"dtype": dtype, "config": config, "name": place.module}
            ranks = self._ranks
            style = None if ranks is None else split_style(model, place.module, model.tp_plan)
            if ranks is None or style is None:
                layer: Any = HfLinear.empty(rows, columns, module.bias, **options)
            else:
                layer = SplitLinear(rows, columns, module.bias, style=style, ranks=ranks, **options)
            layer.stored_name, layer.is_transposed = place.name, isinstance(module, Conv1D)
            layer.is_read = place.module in reads
            layer.dialect = getattr(checkpoint.schema.layers.get(place.stored), "dialect", None)
            layer.__dict__["_is_hf_initialized"] = True  # transformers' mark: nothing is to be drawn at random
            if takes_place:
                schema = checkpoint.schema.layers.get(place.stored)
                size = rows * columns * 5 // 8 if schema is None or schema.nbytes is None else schema.nbytes
                empty = torch.empty(size, dtype=torch.uint8, device="meta")
                layer.register_buffer(_ROOM, empty, persistent=False)
                self._rooms.append(layer)
            model.set_submodule(place.module, layer)

    def adjust_max_memory(self, max_memory: Any) -> Any:
        """Return it as it is: layers count for their packed bytes, which is about what they take prepared."""
        return max_memory

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """Return those that still apply: no packed tensor is loaded by transformers, and not all experts are merged.

        Releases before 5.20 do not name the model: it is the one whose layers were just replaced.
        """
        model = self._model if model is None else model
        if not has_experts(model) or any(are_experts(module) for module in model.modules()):
            return weight_conversions
        return without_experts(weight_conversions)

    def get_weight_conversions(self) -> list[Any]:
        """Return none, as above."""
        return []

    # -- after loading

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        checkpoint, self._checkpoint = self._checkpoint, None
        places, self._places = self._places, []
        self.packed = tuple(place.module for place in places)
        cache, self._cache = self._cache if self._is_on_cpu() else None, None
        if checkpoint is None:
            return model
        drop_conversions(model)
        with checkpoint:
            for name, stored in self._decoded.items():
                model.get_parameter(name).data.copy_(checkpoint.dense[stored])
            for name, (stored, rooms) in self._dequantised.items():
                logger.warning("%s stays dense: %s.", name, self.reasons[name.removesuffix(".weight")])
                dense = q4.dequantize(checkpoint[stored], self._dtype or torch.get_default_dtype())
                dense = dense.T.contiguous() if isinstance(rooms[0][0], Conv1D) else dense
                fill_parameter(model, name, rooms, dense.to(self._device_of(name)))
            self._dequantised = {}
            for place in logging.tqdm(places, desc="Preparing 4-bit layers"):
                layer = model.get_submodule(place.module)
                prepared = None if cache is None else cache.take(place)
                if prepared is not None:
                    layer.adopt(prepared)
                    continue
                device = self._device_of(place.module)
                try:
                    weight = self._weight(checkpoint, place)
                except InputError as error:  # weights that are not finite
                    self._leave_dense(model, checkpoint, place, error)
                    continue
                if isinstance(layer, SplitLinear):
                    layer.adopt(weight, functools.partial(self._read_again, checkpoint.path, place))
                    continue
                layer.adopt(weight if device is None else weight.to(device))
        if cache is not None:
            self.cache_state = cache.store(model, [place for place in places if place.module in self.packed])
        if self.quantization_config.programs and self._ranks is None:
            self._run_by_programs(model)
        return model

    def _run_by_programs(self, model: Any) -> None:
        from q4_transformers.loop import install_loop  # noqa: PLC0415  # for those who want it
        from q4_transformers.programs import install_programs  # noqa: PLC0415  # as above

        install_programs(model)
        if self._is_on_cpu():
            install_loop(model)
            run_encoders_as_programs(model)

    def _read_again(self, path: Path, place: Place) -> PackedWeight:
        """Return the whole weight of a layer of which this process has a part."""
        with q4.open(path) as checkpoint:
            return self._weight(checkpoint, place).contiguous()

    def _leave_dense(self, model: Any, checkpoint: Checkpoint, place: Place, error: InputError) -> None:
        """Make a layer dense that can't be quantised, or raise the error that says how to ask for that."""
        leaf = place.module.rpartition(".")[2] if place.expert is None else "experts"
        if self.quantization_config.skip is None or self._ranks is not None:
            hint = f"{error.hint or ''} Q4Config(modules_to_not_convert=[{leaf!r}]) leaves it dense, and "
            hint += "skip='unsupported' every layer that can't be quantised."
            where = str(checkpoint.path)
            raise InputError(
                place.module, name=error.name, rule=error.rule, value=error.value, where=where, hint=hint.strip()
            ) from error
        packed = model.get_submodule(place.module)
        self.reasons[place.module] = f"{error.name} must be {error.rule}"
        logger.warning("%s stays dense: %s.", place.module, self.reasons[place.module])
        weight = self._dense(checkpoint, place).to(self._device_of(place.module), packed.dtype)
        model.set_submodule(place.module, plain_layer(packed, weight))
        self.packed = tuple(name for name in self.packed if name != place.module)

    def _dense(self, checkpoint: Checkpoint, place: Place) -> torch.Tensor:
        """Return a dense matrix of the checkpoint, [N, K]."""
        dense: torch.Tensor = checkpoint.dense[place.stored]
        dense = dense if place.expert is None else dense[place.expert]
        return dense.T if place.transposed else dense

    def _weight(self, checkpoint: Checkpoint, place: Place) -> PackedWeight:
        """Return a layer's weight as it is stored, or quantised from the dense one that is stored."""
        config = self.quantization_config
        if config.gguf is not None:
            file: GgufFile = config.gguf
            return file.weight(checkpoint, place.stored)
        if config.format is None:
            return checkpoint[place.stored]
        dense = self._dense(checkpoint, place)
        is_symmetric = config.format == "int4" and not config.zero_points
        block = block_size_for(config, dense.shape[1])
        options: Any = {"block_size": block, "symmetric": is_symmetric, "name": place.module}
        return q4.quantize(dense, config.format, **options)

    def _device_of(self, module: str) -> torch.device | None:
        """Return where the device map wants a module; None for where it is."""
        if not isinstance(self._device_map, dict):
            return None
        parts = module.split(".")
        prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        found = next((self._device_map[name] for name in (*prefixes, "") if name in self._device_map), None)
        return None if found is None else torch.device(found)

    # -- what a loaded model can do

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Make every packed layer dense; what transformers' ``model.dequantize()`` calls."""
        make_dense(model, dtype)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Return what ``save_pretrained`` writes; see ``saving``."""
        modules = dict(model.named_modules())
        is_whole = not any(type(modules.get(name)) is nn.Linear for name in self.packed)  # a head may be resized
        return state_and_metadata(model, self.quantization_config, self.dialects, self.entry if is_whole else None)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return True: a model is saved in the dialect that it was read in, or in another one."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether gradients flow through the layers, to adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile the forward pass."""
        return True


def _check_format(checkpoint: Checkpoint, wanted: str | None) -> None:
    """Refuse to quantise what is 4-bit already, and to leave a dense checkpoint as it is.

    Raises:
        ConfigError: The format must be left away, or given.
    """
    found = checkpoint.schema.dialects
    if bool(found) is (wanted is None):
        return
    rule, hint = f"None for a checkpoint that is 4-bit already ({', '.join(found)})", "Leave format= away."
    if not found:
        rule, hint = "given for a checkpoint without 4-bit layers", "Use Q4Config(format='nf4')."
    where = str(checkpoint.path)
    raise ConfigError("Q4Config", name="format", rule=rule, value=wanted, where=where, hint=hint)


def _raise_nothing_packed(wanted: str, reasons: Mapping[str, str], checkpoint: Checkpoint) -> NoReturn:
    """Raise the error for a format that would pack no layer, with the number of layers for each reason."""
    counts = [f"{count} {reason}" for reason, count in Counter(reasons.values()).items()]
    hint = f"Linear layers left dense: {'; '.join(counts) or 'none, as the model has none'}."
    rule, where = "one that packs a layer", str(checkpoint.path)
    raise ConfigError("Q4Config", name="format", rule=rule, value=wanted, where=where, hint=hint)


def _hide(model: Any, names: Iterable[str]) -> None:
    """Make transformers report no tensors that it finds no place for, as we read them."""
    known = model._keys_to_ignore_on_load_unexpected  # noqa: SLF001  # how models of transformers say it
    kind = set if isinstance(known, set) else list  # which of them depends on the version
    model._keys_to_ignore_on_load_unexpected = kind([*(known or ()), _pattern(names)])  # noqa: SLF001


def _pattern(names: Iterable[str]) -> str:
    """Return a regular expression of these names alone; what blocks have alike is in it once, as reading it is slow."""
    numbers: dict[tuple[str, str], set[str]] = {}
    for name in names:
        block = re.search(r"(?<=\.)\d+(?=\.)", name)
        head, number, tail = ("", "", name) if block is None else (name[: block.start()], block[0], name[block.end() :])
        numbers.setdefault((head, tail), set()).add(number)
    tails: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (head, tail), found in sorted(numbers.items()):
        tails.setdefault((head, tuple(sorted(found))), []).append(re.escape(tail))
    parts = [f"{re.escape(head)}(?:{'|'.join(each)})(?:{'|'.join(ends)})" for (head, each), ends in tails.items()]
    return f"^(?:{'|'.join(parts)})$"
