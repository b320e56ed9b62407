"""Benchmarks of Quire; every result includes the machine it ran on."""
