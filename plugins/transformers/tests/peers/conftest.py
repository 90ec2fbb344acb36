"""Fixtures of the tests with transformers, which run in the environment of `nox -s peers`."""

from tests.support.peers import eager, peer, portable, quiet_transformers

__all__ = ["eager", "peer", "portable", "quiet_transformers"]
