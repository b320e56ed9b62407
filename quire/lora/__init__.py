"""LoRA: low-rank terms that requests add to the outputs of linear layers, each its own."""
