"""Measurements of Quire, each with the machine it ran on and the reference numbers it is compared with."""
