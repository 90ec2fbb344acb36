import mmap

import torch

from q4core.mutable.native import Cells

LAYOUT: int
ROWS: int

def Core(memory: mmap.mmap, slots: list[torch.Tensor], here: object, content_bytes: int, /) -> Cells: ...  # noqa: N802  # a class
