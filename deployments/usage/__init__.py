"""API keys: their limits, the accounts of what they use, and what requests cost them."""
