"""What kind of device something was measured on."""

from __future__ import annotations

import platform


def device_name(device: str) -> str:
    """Returns the kind of a device of torch's: work takes as long on others of its kind."""
    import torch

    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)
