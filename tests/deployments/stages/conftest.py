"""Let other tests import what stages hide from diffusers when they import it first."""

from __future__ import annotations

import os
from collections.abc import Iterator

import diffusers.utils.import_utils  # noqa: F401
import pytest


@pytest.fixture(scope="module", autouse=True)
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store measurements of decoders in a temporary folder, unless a cluster's data directory is set."""
    with pytest.MonkeyPatch.context() as patch:
        if "TROUPE_DATA_DIR" not in os.environ:
            patch.setenv("TROUPE_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        yield
