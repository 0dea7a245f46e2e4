"""Arguments of commands, by subject; the others are in ``deployments.cli.main``."""
