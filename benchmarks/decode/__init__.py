"""What a decoder alone takes, on one device and on several."""
