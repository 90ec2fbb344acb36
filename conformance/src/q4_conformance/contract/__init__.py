"""The contract: cases, the table of them, and the use case that each one proves."""
