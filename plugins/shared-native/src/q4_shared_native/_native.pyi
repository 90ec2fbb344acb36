import mmap

import torch

from q4core.mutable.native import Cells

LAYOUT: int
ROWS: int

def Core(  # noqa: N802  # a class
    memory: mmap.mmap, slots: list[torch.Tensor], here: object, content_bytes: int, file: int, /
) -> Cells: ...
