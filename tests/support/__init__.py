"""Helpers that several tests import."""
