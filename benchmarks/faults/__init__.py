"""The application under random kills."""
