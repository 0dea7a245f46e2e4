"""FLUX.1 (dev, schnell and models of the same layout): text to image."""

from pipelines.flux.family import FluxFamily

FAMILY = FluxFamily()

__all__ = ["FAMILY"]
