"""Events, and descriptions of exceptions."""
