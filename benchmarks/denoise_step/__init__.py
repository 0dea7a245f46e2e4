"""A denoising step of FLUX.1-dev: its time on every number of ranks, beside peers."""
