"""Stable Diffusion 3."""
