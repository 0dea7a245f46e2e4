"""Decoder alone, on one device and on several."""
