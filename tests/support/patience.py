"""How long a test waits for what takes seconds."""

PATIENCE_S = 60.0
"""A wait that fails keeps all other tests waiting as well, so one that may take longer says why, where it is."""
