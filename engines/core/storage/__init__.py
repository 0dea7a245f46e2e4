"""What several processes keep in files, and the digest that a file about weights is found by."""
