"""Which published models were timed at full size, by the reports of measurements on GPUs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

REPORTS = Path(__file__).parents[1] / "benchmarks" / "reports"
GPUS = "h[12]00"
"""In the names of reports of machines with GPUs, as a pattern."""
SUBJECTS = ("application", "denoise_step", "model_step", "pairs", "peers", "quad")
"""Of reports that time whole transformers: others are of small models, or of parts."""
CALLED = {"Wan2.1-T2V-14B": "Wan2.1-14B"}
"""What reports call a model, where that is not its name."""
COMMAND = "python -m benchmarks."
PARTS = "benchmarks.decode"
"""A program that times no steps."""


@cache
def timings() -> dict[str, tuple[Path, ...]]:
    """Reports by subject, the newest first."""
    found = {subject: sorted(REPORTS.glob(f"{subject}_*{GPUS}_*.md"), key=_date, reverse=True) for subject in SUBJECTS}
    return {subject: tuple(files) for subject, files in found.items()}


def timed(model: str) -> str:
    """Returns links to the newest report of each subject whose tables, title or commands name ``model``."""
    newest = (next((file for file in files if names(file.read_text(), model)), None) for files in timings().values())
    return ", ".join(f"[{file.stem}](../../benchmarks/reports/{file.name})" for file in newest if file is not None)


def names(report: str, model: str) -> bool:
    """Whether a heading, the first cell of a row or a command names the model, as a whole word."""
    word = "|".join(re.escape(name) for name in (model, CALLED.get(model, model)))
    exact = re.compile(rf"(?<![\w.-])(?:{word})(?![\w-]|\.\w)")
    return any(exact.search(place) for place in _places(report))


def _places(report: str) -> list[str]:
    lines = [line.strip() for line in report.splitlines()]
    headings = [line for line in lines if line.startswith("#")]
    cells = [line.split("|")[1] for line in lines if line.startswith("|")]
    commands = [line for line in lines if COMMAND in line and PARTS not in line]
    return headings + cells + commands


def _date(file: Path) -> str:
    return file.stem.rsplit("_", 1)[1]
