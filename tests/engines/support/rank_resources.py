"""Resources of a rank for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engines.core import resources
from engines.core.resources import RankResources, open_rank_resources


@contextmanager
def separate_rank_resources() -> Iterator[RankResources]:
    """Open new resources for the block; restore the earlier ones after it."""
    before, opened = resources._current, open_rank_resources()
    try:
        yield opened
    finally:
        try:
            opened.close()
        finally:
            resources._current = before
