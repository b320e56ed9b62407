"""Other engines under Quire's CPU workloads, each run by the Python of its own environment."""
