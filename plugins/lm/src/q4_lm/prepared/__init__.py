"""Prepared models on disk: one file each, mapped when the model is opened again."""
