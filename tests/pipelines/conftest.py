from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.pipelines.support.checkpoints import tiny

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices are slower on several threads, and results do not depend on the machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def tiny_schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.flux(tmp_path_factory.mktemp("schnell"), guidance_embeds=False, dynamic_shift=False)


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.wan(tmp_path_factory.mktemp("wan"))
