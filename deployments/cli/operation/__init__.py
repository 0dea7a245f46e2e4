"""Looking at servers that run, and ending them."""
