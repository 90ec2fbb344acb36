"""Self-probes: each path is compared with float64 before it may serve."""
