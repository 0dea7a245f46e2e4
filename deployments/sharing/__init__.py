"""Models that take turns on the same GPUs: the arbiter's actor, and its members."""
