"""Ideogram 4."""
