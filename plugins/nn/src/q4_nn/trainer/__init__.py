"""A thin training loop, checkpoints that resume exactly, and the cost of each layer."""
