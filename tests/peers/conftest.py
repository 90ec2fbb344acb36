"""Fixtures of the tests beside other libraries."""

from tests.support.peers import (
    dense,
    eager,
    nudged,
    on_disk,
    peer,
    portable,
    quiet_transformers,
    rewritten,
    same_bits,
)

__all__ = [
    "dense",
    "eager",
    "nudged",
    "on_disk",
    "peer",
    "portable",
    "quiet_transformers",
    "rewritten",
    "same_bits",
]
