"""Write the tables of README and docs/reference/performance.md: Troupe beside peers at their best setting, and starts.

    PYTHONPATH=. python .ci/peers_document.py

Figures are the lines of ``benchmarks/reports/peers_*.jsonl``, as ``benchmarks.peers.run`` writes them to results.jsonl:
one file a host. Figures that peers publish are in ``published_steps.jsonl`` there; starts in ``cards.jsonl`` and
``sweep.jsonl``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from models_facts import grid, replaced

ROOT = Path(__file__).parents[1]
DOCUMENT, README = ROOT / "docs" / "reference" / "performance.md", ROOT / "README.md"
REPORTS = ROOT / "benchmarks" / "reports"
MARK, STARTS_MARK = "peers", "starts"
PHASES = {
    "processes": ("replica: process", "gang: processes"),
    "connect": ("gang: connect",),
    "weights": ("gang: load",),
    "compile, capture, warm up": ("gang: build",),
    "encoder": ("encoder: weights", "encoder: warm up"),
    "decoder": ("decoder: weights", "decoder: warm up"),
}
"""Columns of the table of starts, and the phases that they add up. Encoder and decoder start beside the gang."""
OURS, SHIPPED, CAPTURED = "Troupe", "as it ships", "captured whole"
PROJECTS = ("SGLang", "vLLM-Omni", "diffusers", "xDiT")
MAKERS = {
    "fast": (OURS, ""),
    "ours": (OURS, ""),
    "sglang": ("SGLang", SHIPPED),
    "sglang-graphs": ("SGLang", "own CUDA graphs"),
    "sglang-blocks": ("SGLang", "blocks compiled"),
    "sglang-compiled": ("SGLang", "compiled"),
    "vllm-omni": ("vLLM-Omni", SHIPPED),
    "vllm-omni-eager": ("vLLM-Omni", "eager"),
    "vllm-omni-tensor": ("vLLM-Omni", "tensor parallel"),
    "diffusers-ulysses": ("diffusers", "Ulysses, blocks compiled"),
    "diffusers-ring": ("diffusers", "ring, blocks compiled"),
    "diffusers-reduce-overhead": ("diffusers", "compiled, reduce-overhead"),
    "diffusers compiled": ("diffusers", "blocks compiled"),
    "diffusers compiled, undivided": ("diffusers", "one GPU, blocks compiled"),
    "diffusers eager": ("diffusers", "eager"),
    "blocks": ("diffusers", "blocks compiled"),
    "eager": ("diffusers", "eager"),
    "xdit": ("xDiT", "Ulysses, blocks compiled"),
}
"""Project and setting by maker, in results of ``benchmarks.model_step``, and in older ones by "case"."""
OTHER_WAYS = ("ours compiled", "ours, prompts filled up", "ours, fp8 attention")
"""Makers of Troupe that are not timed beside peers: a gang with "auto" chooses none of them."""
FLUX = "FLUX.1-dev"
FASTER = "Troupe is faster by"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A timed step and its hardware. A number of branches above one is all forwards of a guided step."""

    model: str
    size: str
    precision: str
    branches: int
    ranks: int
    card: str

    @property
    def order(self) -> tuple[str, int, str, str, int]:
        """Key for rows of one table: model, pixels, precision, card, number of GPUs."""
        return self.model.lower(), prod(map(int, self.size.split("x"))), self.precision, self.card, self.ranks

    @property
    def title(self) -> str:
        width, height, *frames = self.size.split("x")
        clip = [f"{frames[0]} frames"] if frames and frames[0] != "1" else []
        guided = [f"{self.branches} branches"] if self.branches > 1 else []
        return ", ".join((self.model, f"{width} × {height}", *clip, self.precision, *guided))


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    project: str
    setting: str
    median_ms: float

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.project, self.setting)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A step of Troupe and of peers on the same GPUs of one host, and what peers publish for such GPUs."""

    step: Step
    figures: tuple[Figure, ...]
    published: tuple[Figure, ...]

    @property
    def ours_ms(self) -> float:
        return min(figure.median_ms for figure in self.figures if figure.project == OURS)

    def best_of(self, *projects: str) -> Figure | None:
        """Return the figure with the lowest median of all settings; None if nothing was measured."""
        those = [figure for figure in self.figures if figure.project in projects]
        return min(those, key=lambda figure: figure.median_ms, default=None)

    @property
    def best(self) -> Figure:
        """The best peer, measured or published."""
        those = [figure for figure in (*self.figures, *self.published) if figure.project != OURS]
        return min(those, key=lambda figure: figure.median_ms)

    @property
    def ratio(self) -> str:
        """Best peer's time as a multiple of Troupe's; bold if Troupe is not faster."""
        ratio = self.best.median_ms / self.ours_ms
        return f"{ratio:.2f}" if ratio > 1 else f"**{ratio:.2f}**"


def comparisons(reports: Path) -> list[Comparison]:
    """Return the newest comparison of each model, size, precision and number of GPUs."""
    newest: dict[Step, Comparison] = {}
    published = of_published(reports / "published_steps.jsonl")
    for path in sorted(reports.glob("peers_*.jsonl"), key=order_of):
        steps: dict[Step, list[Figure]] = defaultdict(list)
        for line in lines_of(path):
            if "median_ms" in line and not line.get("maker", "").startswith(OTHER_WAYS):
                steps[step_of(line)].append(figure_of(line))
        for step, figures in steps.items():
            if {figure.project == OURS for figure in figures} == {True, False}:
                known = Comparison(step=step, figures=tuple(figures), published=tuple(published[step]))
                newest[step] = known
    return sorted(newest.values(), key=lambda one: one.step.order)


def order_of(path: Path) -> tuple[str, str]:
    """Return the report's date, and its name, which tells hosts that were timed on one day apart."""
    return path.stem[-len("2026-11-26") :], path.stem


def lines_of(path: Path) -> Iterator[Mapping[str, Any]]:
    return (json.loads(line) for line in path.read_text().splitlines())


def of_published(path: Path) -> Mapping[Step, list[Figure]]:
    found: dict[Step, list[Figure]] = defaultdict(list)
    for line in lines_of(path):
        step = Step(**{name: line.get(name, 1) for name in Step.__slots__})
        figure = Figure(project=line["project"], setting=line["setting"], median_ms=line["step_ms"])
        found[step].append(figure)
    return found


def step_of(line: Mapping[str, Any]) -> Step:
    found = re.search(r"NVIDIA (\w+)", line["hardware"])
    card = found[1] if found else line["hardware"]
    if "case" not in line:
        precision = "bf16" if line["precision"] == "native" else line["precision"]
        kept = {name: line[name] for name in ("model", "branches", "ranks")}
        return Step(size=line["size"].removesuffix("x1"), precision=precision, card=card, **kept)
    _, side, ranks, precision, *_ = line["case"].split("/")
    return Step(
        model=FLUX,
        size=f"{side}x{side}",
        precision=precision,
        branches=1,
        ranks=int(ranks.removeprefix("w")),
        card=card,
    )


def figure_of(line: Mapping[str, Any]) -> Figure:
    if "case" in line:
        maker, *options = line["case"].split("/")
        captured = "uncaptured" not in options
    else:
        maker = line["maker"].split(", ")[0].removesuffix("-captured")
        captured = line["maker"].endswith("-captured")
    project, setting = MAKERS[maker]
    if captured and project != OURS:
        setting = CAPTURED if setting == SHIPPED else f"{setting}, {CAPTURED}"
    return Figure(project=project, setting=setting, median_ms=line["median_ms"])


def performance(written: str, known: Iterable[Comparison]) -> str:
    """Return docs/reference/performance.md with its table made anew: a column for each project that was timed."""
    known = list(known)
    projects = [project for project in PROJECTS if any(one.best_of(project) for one in known)]
    columns = (
        "one step, milliseconds, median",
        "GPUs",
        OURS,
        *projects,
        "published",
        "best peer",
        "Troupe is faster by",
    )
    return replaced(written, MARK, grid(columns, (row(one, projects) for one in known)))


def row(one: Comparison, projects: Iterable[str]) -> tuple[str, ...]:
    of_projects = (one.best_of(project) for project in projects)
    published = min((figure.median_ms for figure in one.published), default=None)
    return (
        one.step.title,
        f"{one.step.ranks} × {one.step.card}",
        in_ms(one.ours_ms),
        *(in_ms(figure.median_ms if figure else None) for figure in of_projects),
        in_ms(published),
        one.best.name,
        one.ratio,
    )


def readme(written: str, known: Iterable[Comparison]) -> str:
    """Return README with the ratios, a column for each number of GPUs, if it has a place for them."""
    if f"<!-- {MARK}: " not in written:
        return written
    ratios: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for one in known:
        ratios[one.step.title, one.step.card][one.step.ranks] = one.ratio
    numbers = sorted({ranks for found in ratios.values() for ranks in found})
    columns = ("one step", "card", *(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in numbers))
    rows = ((*key, *(found.get(ranks, "") for ranks in numbers)) for key, found in ratios.items())
    return replaced(written, MARK, grid(columns, rows))


def starts(written: str, reports: Path) -> str:
    """Return docs/reference/performance.md with its table of starts made anew: the largest card of each model."""
    newest: dict[tuple[str, int], Mapping[str, Any]] = {}
    for line in (*sorted(lines_of(reports / "cards.jsonl"), key=card_of), *lines_of(reports / "sweep.jsonl")):
        if PHASES["encoder"][0] in line.get("phases_s", {}):
            newest[line["model"], line.get("ranks", 1)] = line
    columns = ("seconds", "GPUs", "ready", *PHASES, "first picture or clip", "the same again")
    lines = sorted(newest.values(), key=lambda line: (line["model"].lower(), line.get("ranks", 1)))
    return replaced(written, STARTS_MARK, grid(columns, map(start_row, lines)))


def card_of(line: Mapping[str, Any]) -> float:
    return float(line["card_gb"])


def start_row(line: Mapping[str, Any]) -> tuple[str, ...]:
    is_card = "card_gb" in line
    gpus = f"{line['card_gb']:.0f} GB" if is_card else f"{line['ranks']} × {line['hardware'].removeprefix('NVIDIA ')}"
    phases = (sum(line["phases_s"].get(name, 0.0) for name in names) for names in PHASES.values())
    answers = (line[key]["total"] / 1000 for key in ("first_ms", "again_ms"))
    return line["model"], gpus, *(f"{value:.1f}" for value in (line["ready_s"], *phases, *answers))


def in_ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    found = comparisons(REPORTS)
    DOCUMENT.write_text(starts(performance(DOCUMENT.read_text(), found), REPORTS))
    README.write_text(readme(README.read_text(), found))
