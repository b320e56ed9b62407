"""What programs written for vLLM expect of our classes: its other names, arguments and attributes."""
