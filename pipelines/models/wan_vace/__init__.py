"""Wan VACE."""
