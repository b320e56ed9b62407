"""Embeddings, scores and classes: what `LLM` and the server share, and the server's dialect."""
