"""Facts about this computer, and the state of torch."""
