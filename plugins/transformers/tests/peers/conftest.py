"""Fixtures of the tests with transformers, which run in the environment of `nox -s peers`."""

from huggingface_decoders import gemmas_fixture, llamas_fixture, natively_fixture

from tests.support.peers import eager, peer, portable, quiet_transformers

__all__ = [
    "eager",
    "gemmas_fixture",
    "llamas_fixture",
    "natively_fixture",
    "peer",
    "portable",
    "quiet_transformers",
]
