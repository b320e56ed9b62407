"""Data types that cross layers or processes. Importable by all; imports only config."""
