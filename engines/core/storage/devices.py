"""The kind of device that a measurement was made on."""

from __future__ import annotations

import platform


def device_name(device: str) -> str:
    """Return the kind of a torch device; work takes equally long on devices of one kind."""
    import torch

    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)
