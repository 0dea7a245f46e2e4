"""Specs of diffusers' transformer classes: mostly data, one folder a family."""
