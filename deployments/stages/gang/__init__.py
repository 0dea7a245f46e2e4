"""The denoiser of one model: a gang, what its ranks build, who stands by for them, and what is known of their steps."""
