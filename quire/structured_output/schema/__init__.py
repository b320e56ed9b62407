"""JSON schemas and regular expressions: what each library enforces exactly, and simpler forms of the same."""
