"""Sessions, and the functions that people call."""
