"""The parts of a pipeline that a job has for itself: what counts steps or keeps a history must not be shared."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from diffusers.schedulers.scheduling_utils import SchedulerMixin

from pipelines.blocks.guidance import guiders_of
from pipelines.blocks.steps.stand_in import StandIn

T = TypeVar("T")


def own_parts(pipeline: Any) -> dict[str, Any]:
    """Its schedulers and guiders."""
    schedulers = [name for name, part in vars(pipeline).items() if "scheduler" in name and part is not None]
    return {name: getattr(pipeline, name) for name in (*schedulers, *guiders_of(pipeline))}


def with_parts(pipeline: Any, parts: Mapping[str, Any]) -> Any:
    """A pipeline that shares all with ``pipeline`` but copies of ``parts``, and stand-ins of its own."""
    own = copy.copy(pipeline)
    for name, part in parts.items():
        setattr(own, name, copied(part))
    for name, part in vars(pipeline).items():
        if isinstance(part, StandIn):
            setattr(own, name, copy.copy(part))
    return own


def copied(value: T) -> T:
    """A copy that shares tensors, but not the lists, dicts and schedulers that steps may change in place."""
    own = copy.copy(value)
    for name, inner in vars(value).items():
        if isinstance(inner, list | dict) and not name.startswith("_internal"):
            setattr(own, name, copy.copy(inner))
        elif isinstance(inner, SchedulerMixin):
            setattr(own, name, copied(inner))
    return own
