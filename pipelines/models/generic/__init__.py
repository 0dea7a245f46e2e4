"""Transformer classes of diffusers without a family here."""
