"""The denoiser of one model: a gang, and what its ranks build."""
