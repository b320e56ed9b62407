"""Minutes of mixed traffic, and of faults: nothing may be lost, mixed up or left behind."""
