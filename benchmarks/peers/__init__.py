"""Other projects' steps on the same weights."""
