"""What a model needs of given GPUs, and how fast it would be there, from its config alone."""
