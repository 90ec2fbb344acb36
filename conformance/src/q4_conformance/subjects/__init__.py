"""Subjects: backends, functions, dialects, layer types and memory providers, and how they are found by name."""
