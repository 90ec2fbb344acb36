"""Measurements: ``nox -s bench`` (or ``python -m benchmarks``) writes JSON and pictures to ``benchmarks/results``."""
