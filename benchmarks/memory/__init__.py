"""Actors that share a state: updates and reads per second and bytes copied, compared with other ways to share it."""

from benchmarks.memory.command import main

__all__ = ["main"]
