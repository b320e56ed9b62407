"""New weights for a running engine: where they come from, how they are checked, how they replace those in use."""
