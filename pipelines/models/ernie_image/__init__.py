"""ERNIE-Image."""
