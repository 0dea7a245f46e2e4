"""What the cost model knows about this machine."""
