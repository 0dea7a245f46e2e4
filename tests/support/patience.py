"""How long a test waits for work of some seconds."""

PATIENCE_S = 60.0
"""A failing wait delays all other tests, so a longer one gives its reason."""
