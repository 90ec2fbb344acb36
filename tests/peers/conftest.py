"""Fixtures of the tests against other libraries."""

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
