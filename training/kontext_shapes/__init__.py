"""Trains kontext-shapes, a small editor of pictures of the FLUX.1 Kontext architecture."""
