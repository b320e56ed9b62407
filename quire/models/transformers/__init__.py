"""Models of the transformers library that have no family here, run with our attention and kernels."""
