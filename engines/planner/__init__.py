"""What a step costs on a machine, and the cheapest way to divide it."""
