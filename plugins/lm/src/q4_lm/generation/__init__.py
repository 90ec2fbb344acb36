"""Text generation: models in one object, sampling, conversations, perplexity, and sentence vectors."""
