ABI_VERSION: int

def best_isa() -> int: ...

class Matrix:
    def __init__(
        self,
        rows: int,
        columns: int,
        block: int,
        bits: int,
        scale_type: int,
        second: int,
        second_type: int,
        codebook: list[float],
        level: list[int],
        center: float,
        step: float,
        /,
    ) -> None: ...
    @property
    def prepared_bytes(self) -> int: ...
    def pack(self, *arguments: int) -> None: ...
    def unpack(self, *arguments: int) -> None: ...
    def linear(self, *arguments: int) -> None: ...
