"""Programs of networks: what each layer type emits, and what runs them."""
