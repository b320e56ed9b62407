"""All workloads of the reference numbers, beside the figures of other engines."""
