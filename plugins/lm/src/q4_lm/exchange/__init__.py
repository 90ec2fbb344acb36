"""Models of one kind of file as those of another: GGUF files as Hugging Face folders."""
