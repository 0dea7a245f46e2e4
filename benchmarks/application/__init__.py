"""Application at full size on GPUs, over HTTP."""
