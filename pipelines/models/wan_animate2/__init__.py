"""Wan Animate 2."""
