"""The contract: what a case is, the table of cases, and which use case each one proves."""
