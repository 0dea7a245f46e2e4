"""Check a job's outputs for NaN and infinity: NaN would become black pixels without an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engines.core.failures import JobFailedError
from pipelines.blocks import arguments
from pipelines.request import MediaRequest


def finite_flags(values: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return a flag for each floating-point tensor in ``values``, on its device, without waiting."""
    tensors, _ = arguments.split(values)
    return tuple(x.isfinite().all() for x in tensors.values() if x.is_floating_point())


def check_finite(flags: tuple[Tensor, ...], request: MediaRequest, what: str) -> None:
    """Wait for ``flags``, and raise an error if one is false.

    ValueError names the adapters of ``request``; without any, ``JobFailedError``.
    """
    if all(map(bool, flags)):
        return
    problem = f"the {what} of this request are not finite (NaN or infinite)"
    if request.loras:
        names = ", ".join(lora.name for lora in request.loras)
        raise ValueError(f"{problem} with the adapters {names}: leave them out, or give them smaller scales")
    raise JobFailedError(f"{problem}: weights may be damaged, or the dtype too narrow (float16)")
