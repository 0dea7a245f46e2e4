"""What a cluster on this machine needs of its environment: a folder, a token, sessions, and a way past proxies."""
