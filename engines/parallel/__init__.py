"""Strategies that split one denoising step over several ranks. Each takes a kernel and returns a kernel."""
