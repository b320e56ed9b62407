"""Benchmarks for Quire's own development: the card of reference numbers, soak and chaos, host time."""
