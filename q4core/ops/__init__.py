"""Registered torch operations, their derivatives, and the plan of a call."""
