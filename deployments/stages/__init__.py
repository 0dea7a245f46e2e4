"""Serve deployments of one model: text encoder, denoiser (a gang), decoder."""
