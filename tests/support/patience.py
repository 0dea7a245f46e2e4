"""How long a test waits for what takes seconds."""

PATIENCE_S = 240.0
"""A process of low priority (``conftest.py``) may wait minutes for a core while others start servers."""
