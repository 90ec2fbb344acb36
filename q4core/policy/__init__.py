"""Policies, and the configuration of a session."""
