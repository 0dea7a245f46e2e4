"""The notebooks in git have small outputs of one run. The slow tests run them from top to bottom, in kernels."""

from __future__ import annotations

import io
import os
import re
from base64 import b64decode
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
from nbclient import NotebookClient
from PIL import Image

from engines.gang.policies.policy import POLICIES
from tests.deployments.support.live import wait_until
from tests.engines.gang.support.helpers import alive
from tests.support.fenced import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMMAND = "run PYTHONPATH=. python .ci/run_notebooks.py"
MAX_BYTES = 200_000


def read_notebook(path: Path) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_in_git_are_of_one_run(path: Path) -> None:
    """All cells ran in order, without errors and warnings, and the outputs are small."""
    notebook = read_notebook(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], COMMAND
    shown = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in shown} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in shown if output.output_type == "stream"} <= {"stdout"}
    assert outputs(notebook, "image/png")
    assert path.stat().st_size < MAX_BYTES


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """Return the outputs of the cells in one MIME type, in order."""
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


NOTEBOOK = ROOT / "notebooks" / "01_first_picture.ipynb"
YOUR_OWN = ROOT / "notebooks" / "02_your_own_model.ipynb"
UNDER_LOAD = ROOT / "notebooks" / "03_under_load.ipynb"
RECIPES = ROOT / "notebooks" / "05_recipes.ipynb"
CLUSTER = ROOT / "notebooks" / "06_cluster.ipynb"


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()


def assert_all_is_shown(notebook: nbformat.NotebookNode) -> None:
    """Check pictures of the right sizes and several colours, clips, and complete progress."""
    pictures = [
        np.asarray(Image.open(io.BytesIO(b64decode(data))).convert("RGB")) for data in outputs(notebook, "image/png")
    ]
    assert [picture.shape for picture in pictures] == [(128, 128, 3)] * 3 + [(3 * 128, 5 * 128, 3)]
    assert all(np.ptp(picture, axis=(0, 1)).max() > 50 for picture in pictures)
    assert [text.count("<video") for text in outputs(notebook, "text/html")] == [1, 1]
    assert re.search(r"step 20 of 20, \d\.\d s left", str(outputs(notebook, "text/plain")))


@pytest.fixture(autouse=True)
def kernels_find_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.ray
@pytest.mark.slow
def test_first_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))  # kernels inherit it
    before = set(psutil.Process().children(recursive=True))
    notebook = read_notebook(NOTEBOOK)
    run(notebook, tmp_path)
    assert_all_is_shown(notebook)
    left = set(psutil.Process().children(recursive=True)) - before
    wait_until(lambda: not alive(process.pid for process in left), "the notebook's processes are gone")


@pytest.mark.slow
def test_your_own_model(tmp_path: Path) -> None:
    """Its last cell of code compares every strategy with diffusers' own picture, and fails if they differ."""
    notebook = read_notebook(YOUR_OWN)
    run(notebook, tmp_path)
    (plot,) = outputs(notebook, "image/png")
    assert Image.open(io.BytesIO(b64decode(plot))).size[0] > 400
    (errors,) = outputs(notebook, "text/plain")[-2:-1]
    assert "('ring', 4)" in errors


@pytest.mark.ray
@pytest.mark.slow
def test_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy answers all requests in its order, and both plots are there."""
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    notebook = read_notebook(UNDER_LOAD)
    run(notebook, tmp_path)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    orders = {policy: names.split(", ") for policy, names in re.findall(r"^(\w+) answered 7: (.*)$", printed, re.M)}
    assert list(orders) == [*POLICIES]
    assert set(orders["arrival"][:2]) == {"long 1", "long 2"}
    assert orders["shortest"][-1].startswith("long")
    for plot in outputs(notebook, "image/png"):
        assert np.ptp(np.asarray(Image.open(io.BytesIO(b64decode(plot))).convert("RGB"))) > 100
    assert len(outputs(notebook, "image/png")) == 2


@pytest.mark.ray
@pytest.mark.slow
def test_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe is listed, and its pictures are more right and nearer to those of 20 steps than without it."""
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    notebook = read_notebook(RECIPES)
    run(notebook, tmp_path)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "flux-shapes:four-steps" in printed
    rows = re.findall(r"^(.+?) +(\d+) +[\d.]+ +([\d.]+) +([\d.]+)$", printed, re.M)
    steps, right, ssim = ({row[0]: float(row[column]) for row in rows} for column in (1, 2, 3))
    assert list(steps.values()) == [20, 4, 4, 2, 2]
    assert right["four-steps"] >= 0.9 * right["20 steps"]
    assert ssim["four-steps"] > ssim["4 steps"]
    assert right["four-steps, 2 steps"] > right["2 steps"]
    (grid,) = outputs(notebook, "image/png")
    assert np.ptp(np.asarray(Image.open(io.BytesIO(b64decode(grid))).convert("RGB"))) > 100


@pytest.mark.ray
@pytest.mark.slow
def test_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By work fewer GPU-hours give fewer late pictures, turns are faster than parts, and two models take turns.

    Nodes of the live cluster come and go.
    """
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    notebook = read_notebook(CLUSTER)
    run(notebook, tmp_path)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    days = re.findall(r"^by .*: \d+ pictures, ([\d.]+) GPU-hours per 1000, ([\d.]+)% waited", printed, re.M)
    (work_hours, work_share), (request_hours, request_share) = [(float(one), float(two)) for one, two in days]
    assert work_hours < request_hours
    assert work_share > request_share
    in_turns_s, apart_s = map(float, re.findall(r"^on .*: mean latency ([\d.]+) s", printed, re.M))
    assert in_turns_s < apart_s
    assert "8 requests in turns" in printed
    assert re.search(r"^nodes: 0(, \d){2,}, 0$", printed, re.M)
    live = dict(re.findall(r"^(\w+): ([\d.]+) live", printed, re.M))
    assert float(live["most_gangs"]) > 1
    assert float(live["node_s"]) > float(live["gang_s"]) > 0
    assert len(outputs(notebook, "image/png")) == 4
