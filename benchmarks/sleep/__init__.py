"""Weights that sleep in host memory: what a wake-up takes, and models that take turns in the application."""
