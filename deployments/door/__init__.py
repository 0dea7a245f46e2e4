"""HAProxy in front of Ray Serve's proxy, with limits, timeouts and error answers."""
