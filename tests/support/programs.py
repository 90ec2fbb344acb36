"""Programs of networks, compared with their modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from q4_programs import make_program

__all__ = ["check_program", "flat"]


def flat(given: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples."""
    return [item for part in given for item in flat(part)] if isinstance(given, tuple) else [given]


def check_program(model: nn.Module, *inputs: Any) -> None:
    """Compare a program with its modules, twice, for what the first run leaves must not count."""
    program = make_program(model.eval(), *inputs)
    assert program.record.backend is not None, program.record
    before = program.record.calls  # of a program of that name over the same layers
    with torch.no_grad():
        expected = model(*inputs)
        for _ in range(2):
            for one, other in zip(flat(program(*inputs)), flat(expected), strict=True):
                assert one.shape == other.shape
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert program.record.calls == before + 2
