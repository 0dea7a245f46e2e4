"""Measurements. Each program prints a floor first and one JSON document last."""
