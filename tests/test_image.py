"""The commands of the image for CPUs run in turn in their own environment, and the image's program starts.

Some parts are omitted, since they need a container: the base image (this Python is in its place), ``apt-get``,
``useradd``, tini and the user. The image for CUDA differs in the extras that it installs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.deployments.support.commands import SERVING, command, short_folder
from tests.layout.support.source import ROOT, repository_files
from tests.support.images import CPU, image
from tests.support.ports import own_port

# Minutes: torch and Ray are installed.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

OF_ROOT = ("apt-get", "useradd")
"""Programs that change the system."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yield a folder with the content of the image: ``opt/troupe``, where it is built, and ``bin``."""
    built = image(CPU)
    with short_folder() as folder:
        venv.create(folder, with_pip=True)
        work = folder / "opt" / "troupe"
        work.mkdir(parents=True)
        own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": "", **built.arguments}
        for one in built.instructions:
            if one.name == "COPY":
                copy(one.words[:-1], work)
            if one.name == "RUN" and not any(name in one.value for name in OF_ROOT):
                subprocess.run(["sh", "-c", one.value], cwd=work, env=os.environ | own, check=True)
        yield folder


def copy(sources: list[str], work: Path) -> None:
    prefixes = tuple(f"{source}/" for source in sources)
    for name in repository_files():
        if name in sources or name.startswith(prefixes):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, work / name)


def test_what_the_image_starts_answers_its_health_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, port = image(CPU), own_port("the image")
    (*_, program) = built.last("ENTRYPOINT").words
    args = [word.replace("0.0.0.0", "127.0.0.1") for word in built.last("CMD").words]
    (*check, url) = yaml.safe_load(built.last("HEALTHCHECK").value.partition("CMD ")[2])
    own = {name: value.replace("/var", str(folder / "var")) for name, value in built.environment.items()}
    own |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": "", "RAY_TMPDIR": str(folder)}
    for name in built.last("VOLUME").words:
        Path(f"{folder}{name}").mkdir(parents=True, mode=0o700)
    monkeypatch.chdir(folder / "var")  # the repository's own packages are not here
    asked = [*check, url.replace(":8000", f":{port}")]
    with command(
        *args, "--port", str(port), folder=folder, env=own, program=(str(folder / "bin" / program),)
    ) as server:
        with suppress(AssertionError):  # the output says more
            server.wait_for(SERVING)
        assert re.search(SERVING, server.output), server.output
        assert subprocess.run(asked, check=False, stdout=subprocess.DEVNULL).returncode == 0
        assert server.terminate_group() == 143, server.output
    assert (folder / "var" / "lib" / "troupe" / "jobs.sqlite3").is_file()


def test_the_image_has_the_drivers_of_its_stores(folder: Path) -> None:
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-c", "import asyncpg, s3fs, ray.serve"], check=True, cwd=folder, env={})
    asked = [str(folder / "bin" / "troupe"), "serve", str(ROOT / "containers" / "config.yaml"), "--print-config"]
    printed = subprocess.run(asked, check=True, cwd=folder, env={"HOME": str(folder)}, capture_output=True, text=True)
    assert yaml.safe_load(printed.stdout)["applications"][0]["args"]["api"]["storage"] == "s3://troupe"
