"""What is measured of a call: memory, guarded pages, warnings and events, histories, speed."""
