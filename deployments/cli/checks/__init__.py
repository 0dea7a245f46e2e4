"""What this machine can do, and what keeps a configuration from running on it."""
