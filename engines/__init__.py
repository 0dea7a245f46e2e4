"""Denoiser engines: tensors, ranks and time. Nothing here knows a model family or HTTP."""
