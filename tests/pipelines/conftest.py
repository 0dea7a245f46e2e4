"""Tiny checkpoints. Only the fixtures import torch, since some tests of this folder do without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: tiny matrices are slower on several, and results do not depend on the machine.

    It holds for a module's fixtures too, which make most references.
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Path]]:
    """Return a function that builds a tiny checkpoint once a run and returns its folder. No test writes to it."""
    written: dict[Path, dict[Path, int]] = {}

    @cache
    def make(maker: Any) -> Path:
        folder: Path = maker(tmp_path_factory.mktemp("model"))
        written[folder] = stamps(folder)
        return folder

    yield make
    changes = [file for folder, files in written.items() for file, _ in stamps(folder).items() ^ files.items()]
    assert changes == [], "a test wrote to them"


def stamps(folder: Path) -> dict[Path, int]:
    """Return when each file of ``folder`` was last written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


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
