"""A plugin that raises when it is imported, as one whose library is missing does."""

raise ImportError("raised at import, on purpose: libmissing.so.7: cannot open shared object file")
