"""Parts of a pipeline that each job owns: counters of steps and histories must not be shared."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from diffusers.schedulers.scheduling_utils import SchedulerMixin

from pipelines.blocks.guidance import guiders_of
from pipelines.blocks.steps.stand_in import StandIn

T = TypeVar("T")


def own_parts(pipeline: Any) -> dict[str, Any]:
    """Return its schedulers and guiders."""
    schedulers = [name for name, part in vars(pipeline).items() if "scheduler" in name and part is not None]
    return {name: getattr(pipeline, name) for name in (*schedulers, *guiders_of(pipeline))}


def with_parts(pipeline: Any, parts: Mapping[str, Any]) -> Any:
    """Return a pipeline that shares all with ``pipeline`` except copies of ``parts`` and its stand-ins."""
    own = copy.copy(pipeline)
    for name, part in parts.items():
        setattr(own, name, copied(part))
    for name, part in vars(pipeline).items():
        if isinstance(part, StandIn):
            setattr(own, name, copy.copy(part))
    return own


def copied(value: T) -> T:
    """Return a copy that shares tensors, but not the lists, dicts and schedulers that steps may change in place."""
    own = copy.copy(value)
    for name, inner in vars(value).items():
        if isinstance(inner, list | dict) and not name.startswith("_internal"):
            setattr(own, name, copy.copy(inner))
        elif isinstance(inner, SchedulerMixin):
            setattr(own, name, copied(inner))
    return own
