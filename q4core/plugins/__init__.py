"""Hook specifications, discovery and the registry of plugins."""
