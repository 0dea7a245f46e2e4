"""The notebooks run from top to bottom, in a kernel of their own, and lie in git without outputs."""

from __future__ import annotations

import io
import os
from base64 import b64decode
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
import ray
from nbclient import NotebookClient
from PIL import Image

from tests.fenced import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_in_git(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count] == []


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """What the cells show, of one MIME type, in order."""
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


START = 'url = application.enter_context(running(load_config("laptop").with_http(port=0)))'
NOTEBOOK = ROOT / "notebooks" / "01_first_picture.ipynb"


def shows_what_it_should(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run it in ``folder``."""
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    pictures = [
        np.asarray(Image.open(io.BytesIO(b64decode(data))).convert("RGB")) for data in outputs(notebook, "image/png")
    ]
    assert [picture.shape for picture in pictures] == [(128, 128, 3)] * 3 + [(3 * 128, 5 * 128, 3)]
    assert all(np.ptp(picture, axis=(0, 1)).max() > 50 for picture in pictures)
    assert [text.count("<video") for text in outputs(notebook, "text/html")] == [1, 1]
    assert "step 20 of 20, 0.0 s left" in str(outputs(notebook, "text/plain"))


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels inherit."""
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_first_picture(environment: None, url: str, tmp_path: Path) -> None:
    """All of the notebook but the start, which is that of every application here."""
    notebook = read(NOTEBOOK)
    (cell,) = [cell for cell in notebook.cells if START in cell.source]
    address = ray.get_runtime_context().gcs_address
    cell.source = cell.source.replace(START, f"import ray; ray.init({address!r}); url = {url!r}")
    shows_what_it_should(notebook, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_first_picture_from_start_to_end(environment: None, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    shows_what_it_should(read(NOTEBOOK), tmp_path)
    left = {one for one in psutil.Process().children(recursive=True) if one.is_running()} - before
    assert {one for one in left if one.status() != psutil.STATUS_ZOMBIE} == set()
