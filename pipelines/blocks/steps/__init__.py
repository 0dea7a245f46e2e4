"""A job's steps: where it is, the parts that it has for itself, and the blocks on either side of a forward."""
