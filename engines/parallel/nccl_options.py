"""How process groups over NCCL are made; groups of other libraries take no options. Imports torch when called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_CTAS = 64
"""The most that NCCL takes for one exchange."""

_LIMITS = ("min_ctas", "max_ctas")


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclOptions:
    """``high_priority``: exchanges run on a stream that the GPU serves first, so that work beside them cannot hold
    them up. ``min_ctas`` and ``max_ctas`` bound how many thread blocks (and so multiprocessors) an exchange takes;
    None leaves it to NCCL. See ``torch.distributed.ProcessGroupNCCL.Options`` and NCCL's ``ncclConfig_t``.
    """

    high_priority: bool = True
    min_ctas: int | None = None
    max_ctas: int | None = None

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_CTAS:
                raise ValueError(f"{name} is {value}; it must be 1 to {MAX_CTAS}")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ValueError(f"min_ctas {self.min_ctas} is above max_ctas {self.max_ctas}")

    def for_torch(self) -> Any:
        """``pg_options`` for ``init_process_group`` and ``new_group``."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        for name in _LIMITS:
            if getattr(self, name) is not None:
                setattr(options.config, name, getattr(self, name))
        return options


DEFAULT_OPTIONS = NcclOptions()


def inherited_options() -> Any:
    """``pg_options`` for a group between some ranks: those of the gang's own group. None unless that is NCCL's."""
    import torch.distributed as dist

    from engines.core.torch_private import default_nccl_options

    if dist.get_backend() != "nccl":
        return None
    given = default_nccl_options()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.is_high_priority_stream)
    for name in _LIMITS:
        setattr(options.config, name, getattr(given.config, name))
    return options
