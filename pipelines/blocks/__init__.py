"""A job's walk through diffusers' modular blocks, a step at a time; somebody else makes the transformer's forwards."""
