"""Measurements of a call: memory, guarded pages, warnings and events."""
