"""Execution of cases: in this process, or in processes of their own with limits."""
