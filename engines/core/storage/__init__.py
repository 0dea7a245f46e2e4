"""Files shared by several processes, and the digest that identifies weights."""
