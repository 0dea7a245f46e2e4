"""Checkpoints that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Return the folder that a builder of a tiny checkpoint wrote to, once. No test writes to it."""
    return cache(lambda make: make(tmp_path_factory.mktemp("model")))
