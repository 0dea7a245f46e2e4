"""Application on this machine's CPU, over HTTP, beside the same pictures without it."""
