"""Tests of the core, by room; helpers stand in ``tests.support``."""
