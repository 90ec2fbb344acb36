"""Reads GGUF files for q4core."""
