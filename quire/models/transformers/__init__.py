"""The transformers backend: models without a family of ours, run by the library with our attention and kernels."""
