"""What it costs to share a mutable tensor."""
