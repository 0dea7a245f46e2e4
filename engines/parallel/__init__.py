"""Strategies that split one denoising step over several ranks: attention, weights, blocks, guidance branches."""
