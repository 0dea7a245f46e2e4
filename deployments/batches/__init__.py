"""Batches: many requests in one file, made when there is room."""
