"""Full-size models with random weights, their inputs, and the arithmetic that a step of each takes."""
