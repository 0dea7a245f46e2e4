"""The commands in the documents work, typed here against one application with the shipped models.

Its defaults have fewer steps and frames: examples that name neither take a fraction of the time.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import chdir, nullcontext, redirect_stdout
from pathlib import Path

import av
import numpy as np
import pytest
import ray
import yaml
from PIL import Image

from deployments.cli.serving import load_config, parse_config
from tests.deployments.support.commands import troupe
from tests.end_to_end.conftest import NUM_STEPS
from tests.support.fenced import ROOT, Block, blocks

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
BLOCKS = blocks(*DOCUMENTS)
URL = "http://127.0.0.1:8000"
NEEDS_SERVER = (URL, 'ray.init(address="auto"')
TIMEOUT_S = 240.0
WARNINGS = "ignore,error::DeprecationWarning:__main__"
"""The last one counts: a warning about a reader's own lines is an error."""
OUTPUT = re.compile(r"\b[\w-]+\.(?:png|webp|mp4)\b")


OF_PROMETHEUS = "scrape_configs"


def choose(*languages: str, served: bool) -> list[Block]:
    fitting = [block for block in BLOCKS if block.language in languages]
    return [block for block in fitting if any(sign in block.text for sign in NEEDS_SERVER) is served]


def run(language: str, text: str, folder: Path, **env: str) -> str:
    """Return the output of the block. This environment's commands, such as ``python3``, come first on its path."""
    interpreter = (sys.executable, "-c") if language == "python" else ("bash", "-euo", "pipefail", "-c")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    size = {"COLUMNS": "200", "TERM": "dumb", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": WARNINGS}
    done = subprocess.run(
        [*interpreter, text],
        cwd=folder,
        env=os.environ | {"PATH": path} | size | env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_here(text: str, folder: Path) -> str:
    """Return the output of the block, run in this process, which has imported the client already."""
    printed = io.StringIO()
    with chdir(folder), redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
        exec(compile(text, "example.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("block", choose("sh", "python", served=True), ids=str)
def test_example_runs_and_makes_what_it_names(url: str, block: Block, tmp_path: Path) -> None:
    text = block.text.replace(URL, url)
    if block.language == "python" and "ray" not in block.text:
        output = run_here(text, tmp_path)
    else:
        output = run(block.language, text, tmp_path, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    made = set(OUTPUT.findall(block.text))
    assert made or output.strip(), "it shows nothing"
    for name in made:
        assert_is_media((tmp_path / name).read_bytes())


def assert_is_media(data: bytes) -> None:
    """Check that the picture or clip has more than one colour."""
    if data[4:8] == b"ftyp":
        with av.open(io.BytesIO(data), "r") as container:
            frames = [frame.to_image() for frame in container.decode(video=0)]  # type: ignore[no-untyped-call]
        assert len(frames) > 1
    else:
        frames = [Image.open(io.BytesIO(data)).convert("RGB")]
    assert all(max(high - low for low, high in frame.getextrema()) > 50 for frame in frames)


@pytest.mark.parametrize("command", ["troupe --help", "troupe models", "troupe doctor"])
def test_command_of_the_readme(command: str) -> None:
    assert any(line.startswith(command) for block in BLOCKS for line in block.text.splitlines())
    result = troupe(*command.split()[1:])
    assert result.exit_code == 0, result.output
    named = {"troupe --help": "generate", "troupe models": "flux-shapes", "troupe doctor": "Python"}
    assert named[command] in result.output


def test_demo_paints_edits_and_films(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs all of ``make demo`` except the start, which `tests/deployments/cli` tests."""
    monkeypatch.setattr("deployments.cli.demo.started_temporarily", lambda config: nullcontext(url))
    result = troupe("demo", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for name in ("picture.png", "recipe.png", "edited.png", "clip.mp4"):
        assert_is_media((tmp_path / name).read_bytes())
        (line,) = [line for line in result.output.splitlines() if line.startswith(str(tmp_path / name))]
        assert all(stage in line for stage in ("queue", "encode", "denoise", "decode", "total"))
    assert result.output.count(f"step {NUM_STEPS} of {NUM_STEPS}") >= 3
    assert "step 4 of 4" in result.output
    names = ("picture.png", "recipe.png", "edited.png")
    before, by_recipe, after = (np.asarray(Image.open(tmp_path / name)).astype(int) for name in names)
    assert 0 < np.abs(by_recipe - before).mean() < 5, "it is another picture, but hardly"
    assert 2 < np.abs(after - before).mean() < 20, "one shape has another colour"


def test_make_targets_exist(tmp_path: Path) -> None:
    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    targets = {name for text in texts for name in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"demo", "test", "serve", "lint"} <= targets
    run("sh", f"make --dry-run --directory {ROOT} PY=python3 {' '.join(sorted(targets))}", tmp_path)


def test_named_configs_load() -> None:
    texts = " ".join((ROOT / name).read_text() for name in DOCUMENTS)
    named = set(re.findall(r"troupe serve ([a-z]\w*)", texts)) | set(re.findall(r"configs/(\w+)\.yaml", texts))
    assert "gpu4" in named
    for name in named:
        assert load_config(name).app.models


@pytest.mark.parametrize(
    "block", [block for block in choose("yaml", served=False) if OF_PROMETHEUS not in block.text], ids=str
)
def test_configuration_is_valid(block: Block) -> None:
    assert parse_config(yaml.safe_load(block.text)).app.models


@pytest.mark.parametrize("block", choose("json", served=True) + choose("json", served=False), ids=str)
def test_json_is_json(block: Block) -> None:
    assert isinstance(json.loads(block.text), Mapping)
