"""From what a client sent to a checked request. Nothing here needs a server."""
