"""The Ray Serve application: HTTP, handles, command line."""
