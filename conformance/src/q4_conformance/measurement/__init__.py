"""What is measured of a call: memory, guarded pages, warnings, events and histories."""
