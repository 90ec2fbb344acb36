"""Text generation: models in one object, tokenizers, chat templates, sampling, and the command ``q4 generate``."""
