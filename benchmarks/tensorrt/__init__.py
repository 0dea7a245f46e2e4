"""What TensorRT's exports and builds take, and what its precisions cost in pictures."""
