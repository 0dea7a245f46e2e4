"""What an engine is told of the steps that its choices are for, and where these are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.core.model import Branch


@dataclass(frozen=True, kw_only=True, slots=True)
class Choosing:
    """``typical_step()`` gives the branches that most steps are like (none: not known before a request). Decisions are
    kept in ``folder``, under ``name``, for these ``facts`` about the model and its software. ``every_team``: teams of
    all sizes will work, not the whole gang alone.
    """

    typical_step: Callable[[], tuple[Branch, ...]]
    folder: Path
    name: str
    facts: Mapping[str, str]
    every_team: bool = False
