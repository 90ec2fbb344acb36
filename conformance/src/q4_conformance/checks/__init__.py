"""The checks that cases name. Importing this package enters all of them into ``table.CHECKS``."""

from q4_conformance.checks import calls, core, device, endurance, layer, mutable, policy, values

__all__ = ["calls", "core", "device", "endurance", "layer", "mutable", "policy", "values"]
