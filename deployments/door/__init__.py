"""What stands between the world and Ray Serve's proxy: HAProxy, with limits, time-outs and answers of our own."""
