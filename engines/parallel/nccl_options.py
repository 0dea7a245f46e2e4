"""Options of process groups over NCCL; other backends take none. Torch is imported by the functions only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_CTAS = 64
"""Largest number of thread blocks that NCCL accepts for one exchange."""

_LIMITS = ("min_ctas", "max_ctas")


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclOptions:
    """See ``torch.distributed.ProcessGroupNCCL.Options`` and NCCL's ``ncclConfig_t``. None leaves a bound to NCCL."""

    high_priority: bool = True
    """Run exchanges on a high-priority stream, so that work beside them cannot delay them."""
    min_ctas: int | None = None
    """Fewest thread blocks (and so multiprocessors) of an exchange."""
    max_ctas: int | None = None
    """Most thread blocks of an exchange."""

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_CTAS:
                raise ValueError(f"{name} is {value}; it must be 1 to {MAX_CTAS}")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ValueError(f"min_ctas {self.min_ctas} is above max_ctas {self.max_ctas}")

    def for_torch(self) -> Any:
        """Return ``pg_options`` for ``init_process_group`` and ``new_group``."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        for name in _LIMITS:
            if getattr(self, name) is not None:
                setattr(options.config, name, getattr(self, name))
        return options


DEFAULT_OPTIONS = NcclOptions()


def inherited_options() -> Any:
    """Return ``pg_options`` like the default group's for a group of some ranks. None unless that group is NCCL's."""
    import torch.distributed as dist

    from engines.core.torch_private import default_nccl_options

    if dist.get_backend() != "nccl":
        return None
    inherited = default_nccl_options()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=inherited.is_high_priority_stream)
    for name in _LIMITS:
        setattr(options.config, name, getattr(inherited.config, name))
    return options
