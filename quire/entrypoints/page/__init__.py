"""The page at /: a playground, and a live view into the engine."""
