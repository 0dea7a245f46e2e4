"""Tiny checkpoints. Only the fixtures import torch, since some tests of this folder do without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: tiny matrices are slower on several, and results do not depend on the machine.

    It holds for a module's fixtures too, where most references are made.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pipelines.support.checkpoints import tiny

    return tiny.flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def tiny_schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pipelines.support.checkpoints import tiny

    return tiny.flux(tmp_path_factory.mktemp("schnell"), guidance_embeds=False, dynamic_shift=False)


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pipelines.support.checkpoints import tiny

    return tiny.wan(tmp_path_factory.mktemp("wan"))
