"""What a request must get past before a route works for it: places, body, host, origin."""
