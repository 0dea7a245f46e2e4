"""Trains wan-shapes, a small model of clips of the Wan 2.1 architecture."""
