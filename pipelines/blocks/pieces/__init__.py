"""Clips decoded in pieces: of their frames, and of their rows."""
