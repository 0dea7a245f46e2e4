"""Full-size models with random weights, their inputs, and the arithmetic of a step."""
