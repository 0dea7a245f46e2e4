"""Checked requests from what a client sent. Nothing here needs a server."""
