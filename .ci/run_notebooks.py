"""Run the notebooks from top to bottom, and keep their outputs in their files.

PYTHONPATH=. python .ci/run_notebooks.py [NAME ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
DEADLINE_S = 600


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop warnings, logs, times of execution, and the larger one of two forms of a picture."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
            for output in cell.outputs:
                output.pop("transient", None)
                if "image/jpeg" in output.get("data", {}):  # the same picture, at a tenth of the bytes
                    output.data.pop("image/png", None)
    notebook.metadata.pop("language_info", None)
    return notebook


def run(path: Path) -> None:
    """Execute the notebook at ``path`` in a folder and with a data directory of its own, and write it back."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="nb_") as folder:
        os.environ["TROUPE_DATA_DIR"] = f"{folder}/data"  # the kernel inherits it
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=DEADLINE_S, kernel_name="python3", resources=where).execute()
    nbformat.write(cleaned(notebook), path)


if __name__ == "__main__":
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            run(path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")
