"""Layer types by name, and models from plain descriptions."""
