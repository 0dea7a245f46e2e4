"""The whole application at full size on GPUs, over HTTP."""
