"""Helios."""
