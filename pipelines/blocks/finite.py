"""Whether what a job made holds numbers alone: NaN becomes black without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engines.core.failures import JobFailedError
from pipelines.blocks import arguments
from pipelines.request import MediaRequest


def finite_flags(values: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """One flag for each tensor of numbers in ``values``, on its device: nothing waits for it here."""
    tensors, _ = arguments.split(values)
    return tuple(x.isfinite().all() for x in tensors.values() if x.is_floating_point())


def check_finite(flags: tuple[Tensor, ...], request: MediaRequest, what: str) -> None:
    """Wait for ``flags``. ``ValueError`` that names the adapters of ``request`` if one is false; without any
    ``JobFailedError``."""
    if all(map(bool, flags)):
        return
    problem = f"the {what} of this request are not finite (NaN or infinite)"
    if request.loras:
        names = ", ".join(lora.name for lora in request.loras)
        raise ValueError(f"{problem} with the adapters {names}: leave them out, or give them smaller scales")
    raise JobFailedError(f"{problem}: weights may be damaged, or the dtype too narrow (float16)")
