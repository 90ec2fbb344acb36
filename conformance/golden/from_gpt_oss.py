"""MXFP4 as transformers stores the experts of gpt-oss: here one expert, by itself.

transformers dequantises it to any float dtype, transposed. It quantises on a GPU only, so that the stored tensors are
torchao's, in blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import from_torchao
import torch
from case import Case
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "transformers+torchao"


def _stored_as_blocks(case: Case) -> Case:
    packed, scale = case.tensors["proj._weight_qdata"], case.tensors["proj._weight_scale"].view(torch.uint8)
    blocks = packed.reshape(*scale.shape, 16)
    return Case(
        dialect="gpt-oss",
        name=case.name,
        format="mxfp4",
        library=LIBRARY,
        tensors={"proj_blocks": blocks, "proj_scales": scale},
        expected={
            str(dtype).removeprefix("torch."): convert_moe_packed_tensors(blocks[None], scale[None], dtype=dtype)[0].T
            for dtype in (torch.float32, torch.bfloat16)
        },
        shape=case.shape,
        block=32,
        dtype="bfloat16",
        source=case.source,
        config={"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}},
        notes=case.notes,
    )


def cases() -> Iterator[Case]:
    """Yield every case of the dialect."""
    for case in from_torchao.cases():
        if case.name in {"mxfp4-even", "mxfp4-edges", "mxfp4-all-scales"}:
            yield _stored_as_blocks(case)
