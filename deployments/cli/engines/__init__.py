"""What commands about engines do: engine files, ranges of activations, what a step will take."""
