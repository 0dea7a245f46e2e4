"""Cost of a step on a machine, and the cheapest way to divide it."""
