"""FP8 layers, as mixed checkpoints have them next to 4-bit ones: decoded into dense bfloat16 tensors when asked for.

``<module>.weight`` float8_e4m3fn [N, K], and one tensor of scales that multiply:

- ``weight_scale``: [], [1], [N] or [N, 1] (ModelOpt, BFL, compressed-tensors' ``float-`` and ``naive-quantized``);
  [N, K / G]; [ceil(N / 128), ceil(K / 128)], also with axes of 1 in between (ModelOpt);
  uint8 [N, K / 32], powers of two (MXFP8).
- ``weight_scale_inv`` [ceil(N / 128), ceil(K / 128)] (DeepSeek; in spite of its name it multiplies), ``scale`` of
  DeepSeek-V4 in powers of two, and ``scale_weight`` [] or [1].

Scales of activations are part of the layer, and are not used. Each number is the float32 product, rounded once.

Trap: ComfyUI's ``comfy_quant`` may say that the weight is rotated, so that its layers are not read.

Reference:
    nvidia-modelopt 0.47.0: torch/quantization/qtensor/fp8_tensor.py; compressed-tensors 0.20.0:
    quantization/lifecycle/forward_helpers.py; transformers 5.23.0: integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.compressed_tensors_config import group_weights, transform_problems
from q4_dialects.layer_keys import CACHE_SCALES
from q4_dialects.shared_keys import comfy_marker
from q4core import Catalogue, Dialect, DialectError, LayerSchema, Problem
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import PackedWeight

__all__ = ["FP8_SCALES", "Fp8"]

FP8_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "scale")
_INPUTS = ("input_scale", "activation_scale", "scale_input", "output_scale")
_CODES = torch.float8_e4m3fn
_POWERS = frozenset({torch.uint8, torch.float8_e8m0fnu})
_BLOCK, _MX_BLOCK = 128, 32
_MATRIX = 2
_CHUNK = 1 << 20


class Fp8(Dialect):
    """e4m3 with scales that multiply, by tensor, row, group or block. Holds no 4-bit format."""

    name: ClassVar[str] = "fp8"
    formats: ClassVar[frozenset[str]] = frozenset()
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield nothing: there are no 4-bit layers."""
        del catalogue
        return iter(())

    def find_dense(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module of e4m3 with one of the scales, and without ComfyUI's marker."""
        for module in catalogue.modules_with(*FP8_SCALES):
            codes = catalogue.get(f"{module}.weight")
            below = catalogue.children(module)
            if codes is not None and codes.dtype == _CODES and comfy_marker(module, catalogue) is None:
                yield self._layer(module, below, catalogue)

    def _layer(self, module: str, below: Mapping[str, str], catalogue: Catalogue) -> LayerSchema:
        suffix = next(suffix for suffix in FP8_SCALES if suffix in below)
        keys = {"qdata": f"{module}.weight", "scale": f"{module}.{suffix}"}
        keys |= {inputs: f"{module}.{inputs}" for inputs in _INPUTS if inputs in below}
        problems = [
            *catalogue.unknown_scales(module, ("bias", suffix, *_INPUTS, *CACHE_SCALES, "prob_scale")),
            *transform_problems(module, catalogue),
        ]
        shape = catalogue.tensors[keys["qdata"]].shape
        if len(shape) != _MATRIX:
            problems.append(Problem("unsupported", module, "of 2 dimensions to be decoded from FP8", list(shape)))
        info = catalogue.tensors[keys["scale"]]
        blocks = _blocks(shape, info.shape, is_powers=info.dtype in _POWERS, stated=_stated_blocks(catalogue))
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="fp8",
            keys=keys,
            shape=(shape[0], shape[1]) if len(shape) == _MATRIX else None,
            block_size=None if blocks is None else blocks[1],
            problems=problems,
            notes=("decoded from FP8 into a dense bfloat16 tensor",),
            extras=(("blocks", blocks),),
            named=True,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        key = layer.keys["scale"]
        info = catalogue.tensors[key]
        if info.dtype not in {*FLOATS, *_POWERS}:
            yield Problem("dtype", key, "of a float dtype, or of bytes that are powers of two", str(info.dtype)[6:])
        if dict(layer.extras)["blocks"] is None:
            rule = f"one scale, or one for each row, group or block of {list(layer.shape or ())}"
            yield Problem("shape", key, rule, list(info.shape))

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the scales; bytes are powers of two."""
        numbers = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
        return super().stored_numbers(layer, role, numbers, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Refuse: there are no 4-bit layers.

        Raises:
            DialectError: Always.
        """
        del load
        raise self.refusal(layer.module, "dialect", "one of 4-bit layers", self.name)

    def read_dense(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the bfloat16 [N, K], decoded some rows at a time.

        Raises:
            DialectError: A scale is not finite.
        """
        codes, stored = load(layer.keys["qdata"]), load(layer.keys["scale"])
        tall, wide = dict(layer.extras)["blocks"]
        rows, columns = codes.shape
        scale = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(torch.float32)
        if not bool(torch.isfinite(scale).all()):
            raise DialectError(f"layer {layer.module!r}", name="scale", rule="finite")
        scale = scale.reshape(-(-rows // tall), -(-columns // wide))
        result = torch.empty(rows, columns, dtype=torch.bfloat16)
        down, across = torch.arange(rows) // tall, torch.arange(columns) // wide
        for start in range(0, rows, step := max(1, _CHUNK // columns)):
            part = codes[start : start + step].to(torch.float32)
            result[start : start + step] = part.mul_(scale[down[start : start + step]][:, across])
        return result


def _stated_blocks(catalogue: Catalogue) -> list[tuple[int, int]]:
    """Return the shapes of blocks that ``config.json`` states."""
    found: list[Any] = [catalogue.quantization_config.get("weight_block_size")]
    found += [weights.get("block_structure") for weights in group_weights(catalogue)]
    lists = [item for item in found if isinstance(item, list) and len(item) == _MATRIX]
    return [(tall, wide) for tall, wide in lists if all(type(size) is int and size > 0 for size in (tall, wide))]


def _blocks(
    shape: tuple[int, ...], scale: tuple[int, ...], *, is_powers: bool, stated: list[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return rows and columns that share a scale, or None where the shapes don't fit."""
    if len(shape) != _MATRIX or 0 in shape:
        return None
    rows, columns = shape
    if len(scale) == 2 * _MATRIX and scale[1] == scale[3] == 1:
        scale = scale[::2]
    if scale in {(), (1,)}:
        return rows, columns
    if scale in {(rows,), (rows, 1)} and not is_powers:
        return 1, columns
    if len(scale) != _MATRIX:
        return None
    blocks = [*stated, (_BLOCK, _BLOCK), *([(1, _MX_BLOCK)] if is_powers else [])]
    for tall, wide in blocks:
        if scale == (-(-rows // tall), -(-columns // wide)):
            return tall, wide
    is_grouped = scale[0] == rows and scale[1] and columns % scale[1] == 0 and not is_powers
    return (1, columns // scale[1]) if is_grouped else None
