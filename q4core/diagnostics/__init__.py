"""Events, and what other code raised, in words."""
