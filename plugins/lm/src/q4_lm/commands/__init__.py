"""The commands ``q4 generate``, ``chat``, ``perplexity``, ``prepare`` and ``cache``."""
