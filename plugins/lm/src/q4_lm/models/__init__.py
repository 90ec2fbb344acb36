"""Whole networks: their configs, how they are built, and how model files fill them."""
