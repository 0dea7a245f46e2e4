"""Blocks of diffusers that are faulty, and what stands in their place; blocks that it lacks."""
