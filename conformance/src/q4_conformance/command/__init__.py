"""The command ``q4 conform``."""
