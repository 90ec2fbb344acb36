"""``Q4Linear``: its fast path, its state, and the preparation of its weight."""
