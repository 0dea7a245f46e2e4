"""The shipped models for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployments.cli.serving import load_config
from tests.deployments.support.live import live


@pytest.fixture(scope="package")
def url(ray_cluster: None) -> Iterator[str]:
    with live(load_config("laptop").with_http(port=0)) as url:
        yield url
