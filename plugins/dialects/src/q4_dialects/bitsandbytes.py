"""bitsandbytes NF4 and FP4, single and double quantised.

``<module>.weight`` holds the codes of the flattened weight, high nibble first, as uint8 [ceil(N * K / 2), 1] or as the
same bytes viewed as a float dtype; ``<module>.weight.*`` hold block scales (``absmax``), the code book and a JSON text
with block size, dtype and shape. Blocks run over the flattened weight and may straddle rows.

A parameter of any name whose shape is [E, N, K] holds experts, flattened as one: ``<module>.<name>`` and
``<module>.<name>.*``.

Reference:
    bitsandbytes 0.50.2: functional.py (QuantState.as_dict, from_dict), nn/modules.py (Linear4bit),
        nn/parametrize.py (replace_parameter_4bit).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from q4_dialects.experts import expert_layers, expert_of
from q4_dialects.quant_state import DTYPES, BadStateError, State, parse
from q4core import (
    BlockOrder,
    Catalogue,
    Dialect,
    DialectError,
    Feature,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    ScaleKind,
    WrittenLayer,
    find_format,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["BitsAndBytes"]

_STATE = "quant_state.bitsandbytes__"
_KINDS = ("fp4", "nf4")
_SIDE = {
    "scale": "absmax",
    "codebook": "quant_map",
    "nested_scale": "nested_absmax",
    "nested_codebook": "nested_quant_map",
}
_NESTED = ("nested_scale", "nested_codebook")
_STORAGE = {torch.uint8, *DTYPES.values()}
_MATRIX, _EXPERTS = 2, 3


class BitsAndBytes(Dialect):
    """NF4 and FP4 as bitsandbytes stores them."""

    name: ClassVar[str] = "bitsandbytes"
    formats: ClassVar[frozenset[str]] = frozenset(_KINDS)
    numbers: ClassVar[Mapping[str, str]] = {
        "scale": "finite",
        "codebook": "finite",
        "nested_scale": "finite and not negative",
        "nested_codebook": "finite",
    }

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with any side tensor of bitsandbytes, and each expert of a parameter with a JSON text."""
        states = [f"{_STATE}{kind}" for kind in _KINDS]
        for module in catalogue.modules_with(*(f"weight.{suffix}" for suffix in (*_SIDE.values(), *states))):
            yield from self._layers(f"{module}.weight", catalogue)
        for parameter in catalogue.modules_with(*states):
            if parameter.rpartition(".")[2] != "weight":
                yield from self._layers(parameter, catalogue)

    def _layers(self, parameter: str, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield the one layer of a matrix, or one for each expert of a parameter."""
        below = catalogue.children(parameter)
        states = [suffix for suffix in below if suffix.startswith(_STATE)]
        kinds = [suffix.removeprefix(_STATE) for suffix in states if suffix.removeprefix(_STATE) in _KINDS]
        kind = kinds[0] if kinds else _kind_of(catalogue, f"{parameter}.{_SIDE['codebook']}")
        keys = {"qdata": parameter}
        keys |= {role: f"{parameter}.{suffix}" for role, suffix in _SIDE.items() if role not in _NESTED}
        keys["quant_state"] = f"{parameter}.{_STATE}{kind}"
        module, problems = self._strangers(parameter, kind, states, catalogue)
        state, problem = self._state(catalogue, keys["quant_state"], kind)
        if problem is not None:
            problems.append(problem)
        absmax = catalogue.get(keys["scale"])
        if state is not None:
            is_nested = state.nested_block_size is not None
        else:
            is_nested = absmax is not None and absmax.dtype == torch.uint8
        present = [role for role in _NESTED if _SIDE[role] in below]
        keys |= {role: f"{parameter}.{_SIDE[role]}" for role in (_NESTED if is_nested else present)}
        if present and not is_nested:
            rule = "absent, as the layer's JSON names no second level"
            problems += [Problem("unknown_key", keys[role], rule) for role in present]
        shape = None if state is None else _matrix_of(state, is_weight=module != parameter)
        if isinstance(shape, str):
            problems.append(Problem("unsupported", module, shape, list(state.shape) if state else None))
            shape = None
        layer = LayerSchema(
            module=module,
            dialect=self.name,
            format=kind,
            keys=keys,
            shape=shape,
            block_size=None if state is None else state.block_size,
            problems=problems,
            extras=(("state", state),),
            named=True,
        )
        codes = catalogue.get(parameter)
        is_whole = codes is None or state is None or codes.nbytes == -(-math.prod(state.shape) // 2)
        if state is not None and len(state.shape) == _EXPERTS and is_whole:  # a text alone makes no thousand layers
            yield from expert_layers(layer, state.shape[0], catalogue)
        else:
            yield layer

    @staticmethod
    def _strangers(parameter: str, kind: str, states: list[str], catalogue: Catalogue) -> tuple[str, list[Problem]]:
        """Return the layer's name, and the scale-like tensors next to it that are not part of it."""
        holder, _, name = parameter.rpartition(".")
        parts = (*_SIDE.values(), f"{_STATE}{kind}")
        if name == "weight":
            known = ("bias", "weight", *(f"weight.{part}" for part in parts))
            return holder, list(catalogue.unknown_scales(holder, known))
        rule = f"one that the dialect knows ({', '.join(sorted(parts))})"
        others = [Problem("unknown_key", f"{parameter}.{state}", rule) for state in states if state not in parts]
        return parameter, [*catalogue.unknown_scales(parameter, parts), *others]

    @staticmethod
    def _state(catalogue: Catalogue, key: str, kind: str) -> tuple[State | None, Problem | None]:
        stored = catalogue.load_small(key)
        if stored is None:
            return None, None
        if stored.dtype != torch.uint8:
            return None, Problem("dtype", key, "of dtype uint8", str(stored.dtype).removeprefix("torch."))
        try:
            return parse(stored, kind), None
        except BadStateError as error:
            return None, Problem("value", key, *error.args)

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape; sizes are compared where the JSON text could be read."""
        state: State | None = dict(layer.extras)["state"]
        keys = layer.keys
        yield from self.expect(catalogue, keys["qdata"], dtypes=_STORAGE, shape=(None, 1))
        yield from self.expect(catalogue, keys["codebook"], dtypes={torch.float32}, shape=(16,))
        yield from self.expect(catalogue, keys["quant_state"], dtypes={torch.uint8}, shape=(None,))
        blocks = nested_blocks = None
        if state is not None:
            total = math.prod(state.shape)
            blocks = -(-total // state.block_size)
            codes = catalogue.get(keys["qdata"])
            if codes is not None and codes.nbytes != -(-total // 2):
                rule = f"{-(-total // 2)} bytes long, for {total} codes"
                yield Problem("shape", keys["qdata"], rule, f"{list(codes.shape)} of {codes.nbytes} bytes")
            if state.nested_block_size is not None:
                nested_blocks = -(-blocks // state.nested_block_size)
        is_nested = "nested_scale" in keys
        dtype = torch.uint8 if is_nested else torch.float32
        yield from self.expect(catalogue, keys["scale"], dtypes={dtype}, shape=(blocks,))
        if is_nested:
            yield from self.expect(catalogue, keys["nested_scale"], dtypes={torch.float32}, shape=(nested_blocks,))
        yield from self.expect(catalogue, keys.get("nested_codebook"), dtypes={torch.float32}, shape=(256,))

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; blocks that do not straddle rows are stored by row.

        Scales of two levels are resolved to float32 for an expert in the middle of a second-level block.

        Raises:
            DialectError: The JSON text is malformed, or states a shape that can't be read.
        """
        keys = layer.keys
        try:
            state = parse(load(keys["quant_state"]), layer.format)
        except BadStateError as error:
            rule, value = error.args
            raise DialectError(f"layer {layer.module!r}", name="quant_state", rule=rule, value=value) from error
        expert = expert_of(layer)
        if len(state.shape) != (_MATRIX if expert is None else _EXPERTS):
            rule = "of 2 dimensions, or of 3 for experts that were told apart by their JSON text"
            raise DialectError(f"layer {layer.module!r}", name="shape", rule=rule, value=list(state.shape))
        rows, columns = math.prod(state.shape[:-1]), state.shape[-1]
        kind = find_format(state.kind)
        by_row = columns % state.block_size == 0
        stored, absmax, table = load(keys["qdata"]), load(keys["scale"]), load(keys["codebook"])
        codes = stored.view(torch.uint8).reshape(-1)
        notes = []
        if stored.dtype != torch.uint8:
            notes.append(self.stored_fact("quant_storage", str(stored.dtype).removeprefix("torch.")))
        text = bytes(load(keys["quant_state"]).tolist()).decode("utf-8")
        if text != state.text():
            notes.append(self.stored_fact("quant_state", text))
        levels: dict[str, Any] = {}
        if state.nested_block_size is not None:
            levels = {
                "scale_kind": ScaleKind.DOUBLE_QUANT,
                "nested_codebook": load(keys["nested_codebook"]),
                "nested_scale": load(keys["nested_scale"]),
                "nested_offset": torch.tensor(state.nested_offset, dtype=torch.float32),
                "nested_block_size": state.nested_block_size,
            }
        weight = PackedWeight(
            format=kind,
            qdata=codes.view(rows, -1) if by_row else codes,
            scale=absmax.view(rows, -1) if by_row else absmax,
            out_features=rows,
            in_features=columns,
            block_size=state.block_size,
            packing=Packing.HIGH_FIRST,
            blocks=BlockOrder.ROW if by_row else BlockOrder.FLAT,
            codebook=None if torch.equal(_bits(table), _bits(kind.codebook_tensor())) else table,
            dtype=state.dtype,
            name=layer.module,
            dialect=self.name,
            notes=(*layer.notes, *notes),
            **levels,
        )
        return weight if expert is None else _cut(weight, expert, state.shape[1])

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors that ``Linear4bit`` and ``QuantState.from_dict`` take.

        An expert becomes a matrix of its own, ``<parameter>.<expert>.weight``, which reads as the same weight under the
        same name: one weight does not say what the others are, and layers are written one at a time.

        Raises:
            DialectError: Another format or scale kind, blocks that restart in each row and do not fill it, or
                features beyond a code book.
        """
        self.check_writable(module, weight, features={Feature.FLAT_BLOCKS, Feature.CUSTOM_CODEBOOK})
        if weight.scale_kind not in {ScaleKind.PLAIN, ScaleKind.DOUBLE_QUANT}:
            raise self.refusal(module, "scale_kind", "plain or double_quant", weight.scale_kind.value)
        is_nested = weight.scale_kind is ScaleKind.DOUBLE_QUANT
        rows, columns = weight.shape
        state = State(
            kind=weight.format.name,
            block_size=weight.block_size,
            dtype=weight.dtype,
            shape=(rows, columns),
            nested_block_size=weight.nested_block_size if is_nested else None,
            nested_offset=None if weight.nested_offset is None else float(weight.nested_offset),
        )
        text = state.text()
        read = self.read_fact(weight, "quant_state")
        if read is not None and json.loads(read) == json.loads(text):
            text = read
        codes = self.flat_bytes(weight, Packing.HIGH_FIRST)[: -(-rows * columns // 2)]
        storage = DTYPES.get(self.read_fact(weight, "quant_storage"), torch.uint8)
        if codes.numel() % storage.itemsize == 0:
            codes = codes.contiguous().view(storage)
        table = weight.format.codebook_tensor(weight.device) if weight.codebook is None else weight.codebook
        scale = weight.scale.reshape(-1)
        tensors = {
            "weight": codes.reshape(-1, 1),
            "weight.absmax": scale if is_nested else scale.to(torch.float32),
            "weight.quant_map": table.to(torch.float32),
            f"weight.{_STATE}{state.kind}": torch.tensor(list(text.encode("utf-8")), dtype=torch.uint8),
        }
        if weight.nested_scale is not None and weight.nested_codebook is not None:
            tensors["weight.nested_absmax"] = weight.nested_scale.to(torch.float32)
            tensors["weight.nested_quant_map"] = weight.nested_codebook.to(torch.float32)
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Leave out the activation scale."""
        return attrs.evolve(weight, activation_scale=None)

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return transformers' ``BitsAndBytesConfig``."""
        specs = list(layers.values())
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": specs[0].format.name,
            "bnb_4bit_use_double_quant": any(spec.scale_kind is ScaleKind.DOUBLE_QUANT for spec in specs),
            "bnb_4bit_compute_dtype": str(specs[0].dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(unquantised) or None,
        }


def _kind_of(catalogue: Catalogue, codebook: str) -> str:
    """Return the format whose JSON text is missing, by its codebook; ``nf4`` where that decides nothing."""
    table = catalogue.load_small(codebook)
    numbers = None if table is None else table.reshape(-1).tolist()
    return next((kind for kind in _KINDS if numbers == list(find_format(kind).codebook)), "nf4")


def _matrix_of(state: State, *, is_weight: bool) -> tuple[int, int] | str:
    """Return the shape of the weight, or of each expert's; else the rule that it breaks."""
    if len(state.shape) == _MATRIX and is_weight:
        return state.shape[0], state.shape[1]
    if len(state.shape) != _EXPERTS:
        return "of 2 dimensions, or of 3 for experts" if is_weight else "of 3 dimensions, as only experts are read so"
    _, rows, columns = state.shape
    if rows * columns % state.block_size:
        return f"[E, N, K] with N * K a multiple of the block size {state.block_size}, so that no two experts share one"
    return rows, columns


def _cut(weight: PackedWeight, expert: int, rows: int) -> PackedWeight:
    """Return the rows of one expert, whose blocks are all its own."""
    if weight.blocks is BlockOrder.ROW:
        return weight.narrow(0, expert * rows, rows)
    codes = rows * weight.in_features
    count = codes // weight.block_size
    first = expert * count
    blocks = slice(first, first + count)
    changes: dict[str, Any] = {"scale": weight.scale[blocks]}
    if weight.nested_scale is not None and first % weight.nested_block_size:
        changes = {"scale": weight.resolved_scale(blocks), "scale_kind": ScaleKind.PLAIN}
        changes |= dict.fromkeys(("nested_codebook", "nested_scale", "nested_offset"))
    elif weight.nested_scale is not None:
        start = first // weight.nested_block_size
        changes["nested_scale"] = weight.nested_scale[start : start + -(-count // weight.nested_block_size)]
    qdata = weight.qdata[expert * codes // 2 : (expert + 1) * codes // 2]
    return attrs.evolve(weight, qdata=qdata, out_features=rows, **changes)


def _bits(table: torch.Tensor) -> torch.Tensor:
    return table.view(torch.int32)
