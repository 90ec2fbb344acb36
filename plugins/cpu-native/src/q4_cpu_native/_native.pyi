ABI_VERSION: int

def best_isa() -> int: ...
def has_isa(isa: int, /) -> int: ...
def isa_was_run(isa: int, /) -> bool: ...
def isa_name(isa: int, /) -> str | None: ...

class Matrix:
    def __init__(
        self,
        rows: int,
        columns: int,
        block: int,
        super_blocks: int,
        bits: int,
        held_bits: int,
        first: int,
        scale_type: int,
        second: int,
        second_type: int,
        is_unsigned: bool,
        codebook: list[float],
        level: list[int],
        center: float,
        step: float,
        word: list[int],
        word_step: float,
        /,
    ) -> None: ...
    @property
    def prepared_bytes(self) -> int: ...
    def pack(self, *arguments: int) -> None: ...
    def unpack(self, *arguments: int) -> None: ...
    def linear(self, *arguments: int) -> int: ...
    def spikes(self, *arguments: int) -> None: ...

class Program:
    def __init__(self) -> None: ...
    def add(
        self,
        op: int,
        views: list[int],
        inputs: int,
        numbers: list[float],
        matrix: Matrix | None,
        tiles: int,
        scale: int,
        count: int,
        divides: bool,
        family: int,
        order: int,
        factor: int,
        factor_type: int,
        synapses: list[int],
        cache_type: int,
        /,
    ) -> None: ...
    def bind(self, threads: int, isa: int, clock: int, streams: list[int], tokens: int, most: int, /) -> int: ...
    def run(self, threads: int, rounds: int, streams: list[int], turn: int, context: int, /) -> int: ...
    def outlier_rows(self) -> list[int]: ...
