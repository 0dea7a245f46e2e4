"""The application on this machine, through HTTP, beside the same pictures without it."""
