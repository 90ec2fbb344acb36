"""Whole networks: their configs, their construction, and loading from model files."""
