"""A door with long timeouts: the servers of these tests share a busy process."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from deployments.door import haproxy
from tests.deployments.door.support import Backend, doored, served
from tests.support.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "CHECK_S", PATIENCE_S)


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def client(backend: Backend) -> Iterator[httpx.Client]:
    with served(backend) as address, doored(address) as (_, client):
        yield client
