"""Loop blocks of diffusers that multiply a step's timestep with a mask on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class TimestepOnDevice:
    """Mixin that hands the timestep to a loop block on the device of the latents.

    Jobs keep timesteps on the CPU, where blocks read them without a device synchronization. A tensor of one value there
    does not mix with one of the device.
    """

    def __call__(self, components: Any, block_state: Any, i: int, t: Tensor) -> tuple[Any, Any]:
        here = t.to(block_state.latents.device, non_blocking=True)
        result: tuple[Any, Any] = super().__call__(components, block_state, i=i, t=here)  # type: ignore[misc]
        return result
