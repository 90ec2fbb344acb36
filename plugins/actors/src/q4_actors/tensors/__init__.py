"""Tensors that threads and processes update in place: one writer, many readers, whole versions."""
