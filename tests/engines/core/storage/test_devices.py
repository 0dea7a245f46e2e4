"""Measurements are stored per device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engines.core.storage import device_name


@pytest.fixture
def threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_a_cpu_with_other_threads_is_another_device(threads: None) -> None:
    torch.set_num_threads(1)
    one = device_name("cpu")
    torch.set_num_threads(2)
    assert one != device_name("cpu")
    assert one.endswith("1 threads")
