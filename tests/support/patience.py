"""How long a test waits for what takes seconds."""

PATIENCE_S = 240.0
"""Processes that stand back (``conftest.py``) may wait minutes for a core while others start servers."""
