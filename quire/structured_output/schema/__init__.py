"""JSON schemas and regular expressions: what each backend enforces exactly, and rewriting into simpler forms."""
