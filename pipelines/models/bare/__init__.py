"""Transformers that come from no folder, as benchmarks and tests make them."""
