"""Difference of two tensors, digest of a module's weights, a device with its index, and whether code is exported."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def relative_difference(given: Tensor, expected: Tensor) -> float:
    """Return the 2-norm of the difference, divided by that of ``expected``.

    The result is infinite if shapes differ or the quotient is NaN, which ``max`` would ignore. Two all-zero tensors
    have difference 0.
    """
    if given.shape != expected.shape:
        return float("inf")
    apart = (given.double() - expected.double()).norm()
    relative = float(apart / expected.double().norm()) if apart else 0.0
    return float("inf") if math.isnan(relative) else relative


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 8191
"""Period up to which a sum distinguishes the places of its values."""


def fingerprint(module: nn.Module) -> str:
    """Return a digest of names, shapes, dtypes and all values.

    Values enter as sums of their bits, which are the same on every device and in any order.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_bit_sums(tensor.detach())}".encode())
    return digest.hexdigest()[:32]


def _bit_sums(tensor: Tensor) -> list[int]:
    bits = tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    places = torch.arange(1, _WEIGHTS + 1, device=bits.device)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for part in torch.split(
        bits, _WEIGHTS << 10
    ):  # a copy in int64 of a whole large tensor would be four times its size
        wide = part.long()
        whole = functional.pad(wide, (0, -len(wide) % _WEIGHTS)).view(-1, _WEIGHTS)
        sums += torch.stack((wide.sum(), (whole.sum(dim=0) * places).sum()))
    return sums.tolist()


def device_with_index(device: torch.device) -> torch.device:
    """Return ``device``; ``cuda`` alone becomes the current GPU of this thread, which other threads do not share."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_exporting() -> bool:
    """Return whether the caller is being exported. PyTorch 2.11 reports this for compiled code, too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
