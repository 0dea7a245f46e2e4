"""What a gang does between steps."""
