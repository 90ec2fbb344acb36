"""Which backend serves a request, and why the others do not."""
