"""A traced forward, taken apart where tokens are cut and joined."""
