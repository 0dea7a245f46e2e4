"""Trains flux-shapes, a small model of pictures of the FLUX.1 architecture."""
