"""Who is judged: backends, functions, dialects and memory providers, and how they are found by name."""
