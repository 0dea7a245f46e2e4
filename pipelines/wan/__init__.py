"""Wan 2.1 and 2.2 (and models of the same layout): text to video."""

from pipelines.wan.family import WanFamily

FAMILY = WanFamily()

__all__ = ["FAMILY"]
