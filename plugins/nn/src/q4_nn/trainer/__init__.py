"""A thin training loop, checkpoints that resume exactly, and what each layer costs."""
