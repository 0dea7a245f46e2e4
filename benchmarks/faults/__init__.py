"""Application under random kills."""
