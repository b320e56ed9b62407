"""What crosses a boundary between layers or processes. Importable by all; imports only config."""
