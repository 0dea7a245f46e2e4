"""Facts of published models: licence, memory, where they were seen and timed, what they make. Tables of documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import yaml
from torch import nn

from benchmarks.sweep.result_file import DECODE_ERROR, ERROR, Result, ResultFile
from engines.core.model import DenoiserModel
from engines.parallel.pipeline import pipeline_blocks
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.loading import PUBLISHED

T = TypeVar("T")
NONE = "—"
"""An empty cell."""
NOT_FOUND = "see its page"
DATA = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())


def licence_of(model: str) -> str:
    known = {
        name: licence for licence, names in DATA["licences"].items() for name in names.split() if model.startswith(name)
    }
    return known[max(known, key=len)] if known else NOT_FOUND


def configuration(name: str) -> str:
    """Return the first model with the same configuration, which has the same weights."""
    parts = (json.loads(file.read_text()) for file in sorted((PUBLISHED / name).glob("*/config.json")))
    own = [part for part in parts if re.search("Transformer|^UNet", part["_class_name"])]
    return _SAME.setdefault(json.dumps(own), name)


_SAME: dict[str, str] = {}


def counted(name: str) -> tuple[int, tuple[str, ...]]:
    """Return parameters, and the GiB of weights in bfloat16 of a rank: whole, or with weights divided."""
    return _counted(configuration(name))


@cache
def _counted(name: str) -> tuple[int, tuple[str, ...]]:
    model = Checkpoint.of_configuration(name, "meta", "bfloat16").weightless()
    number = sum(weight.numel() for module in model.modules.values() for weight in module.parameters())
    divided = [(tensor, 1) for tensor in (2, 4)] + [(1, stages) for stages in (2, 4)]
    whole = gib(model, 1, 1)
    shares = (gib(model, *way) if allows(model, *way) else None for way in divided)
    return number, (f"{whole:.1f}", *("—" if share is None else f"{share:.1f}" for share in shares))


def allows(model: DenoiserModel, tensor: int, stages: int) -> bool:
    if tensor > 1:
        return bool(model.plan.linears) and model.num_heads % tensor == 0
    return min(len(pipeline_blocks(module, model.plan)) for module in model.modules.values()) >= stages


def gib(model: DenoiserModel, tensor: int, stages: int) -> float:
    """Count like the cost model: the tensor axis divides linears of blocks, stages divide blocks, the rest is whole."""
    total = 0.0
    for module in model.modules.values():
        inner = {id(weight) for block in model.plan.blocks_of(module) for weight in block.parameters()}
        linears = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear))
        split = {id(layer.weight) for name, layer in linears if model.plan.rule_of(name) is not None}
        for weight in module.parameters():
            share = weight.nbytes / (tensor if id(weight) in split else 1)
            total += share / (stages if id(weight) in inner else 1)
    return total / 2**30


REPORTS = Path(__file__).parents[1] / "benchmarks" / "reports"
RESULTS = REPORTS / "sweep.jsonl"
NOT_YET = "not yet"
MOST_SAID = 160
"""Characters of a reason."""


def seen(model: str) -> str:
    """Return date, milliseconds a step and GPUs of each number of ranks, or why there are none; or "not yet"."""
    newest = {one["ranks"]: one for one in swept() if one["model"] == model}
    return "; ".join(in_short(newest[ranks]) for ranks in sorted(newest)) or NOT_YET


@cache
def swept() -> tuple[Result, ...]:
    return tuple(of_gpus(ResultFile(RESULTS).results()))


def of_gpus(results: Iterable[Result]) -> Iterable[Result]:
    return (one for one in results if one["hardware"] != "CPU")


def in_short(result: Result) -> str:
    where = f"{result['ranks']} × {result['hardware'].removeprefix('NVIDIA ')}"
    if ERROR in result:
        reason = str(result[ERROR]).strip().splitlines()[-1].replace("|", "/")
        return f"{result['date']}, {where}: failed ({reason[:MOST_SAID]})"
    faults = [] if result["captured"] else ["not captured"]
    faults += [] if result["same_bytes"] else ["not the same bytes twice"]
    faults += ["not decoded"] if DECODE_ERROR in result else []
    part = "" if result["through"] == "application" else f"{result['through']} alone"
    notes = ", ".join(filter(None, (part, *faults)))
    return f"{result['date']}, {where}, {result['size']}: {result['step_ms']} ms" + (f" ({notes})" if notes else "")


SERVED: Mapping[str, tuple[Callable[[Defaults], bool], str]] = {
    "text to picture": (lambda one: one.kind == "image" and not one.min_pictures, "text2image"),
    "picture to picture": (
        lambda one: one.kind == "image" and one.max_pictures > 0,
        "image2image|img2img|image_conditioned",
    ),
    "inpainting": (lambda one: one.kind == "image" and one.takes_mask, "inpaint"),
    "layers": (lambda one: one.max_layers > 0, "(?!)"),
    "text to clip": (lambda one: one.kind == "video" and not (one.min_pictures or one.needs_source), "text2video|t2va"),
    "picture to clip": (
        lambda one: one.kind == "video" and one.max_pictures > 0 and not one.needs_source,
        "image2video|flf2v|fl2va|condition$",
    ),
    "clip to clip": (lambda one: one.max_video_frames > 0 and not one.needs_source, "video2video|in_context"),
    "references to clip": (lambda one: one.needs_source, "ref2va"),
    "sound": (lambda one: one.kind == "video" and one.make_sound, "sound|t2va"),
}
"""Uses by name: whether a model's defaults offer it, and a pattern of the workflows that need it."""
NOT_SERVED = "controlnet|ip_adapter|action"
"""Marks of workflows that need inputs which no request has."""


def served(models: Iterable[Defaults]) -> list[str]:
    """Return the uses that one of ``models`` offers, in the order of ``SERVED``."""
    made = [one.of(kind) for one in models for kind in one.kinds]
    return [word for word, (asks, _) in SERVED.items() if any(map(asks, made))]


def beyond(declared: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the declared workflows that are not served. Several with one mark count once, as ``controlnet_…``."""
    known = set(words)
    rest = [
        _brief(flow)
        for flow in declared
        if not _meant(flow) <= known or not _meant(flow) or re.search(NOT_SERVED, flow)
    ]
    return list(dict.fromkeys(rest))


def _meant(flow: str) -> set[str]:
    return {word for word, (_, pattern) in SERVED.items() if re.search(pattern, flow)}


def _brief(flow: str) -> str:
    marks = ("ip_adapter", "controlnet_union", "controlnet")
    return next((f"{mark}_…" for mark in marks if flow.startswith(mark)), flow)


GPUS = "h[12]00"
"""Pattern in the names of reports of machines with GPUs."""
SUBJECTS = ("application", "denoise_step", "model_step", "pairs", "peers", "quad")
"""Subjects of reports that time whole transformers; others are of small models, or of parts."""
COMMAND = "python -m benchmarks."
PARTS = "benchmarks.decode"
"""A program that times no steps."""


@cache
def timings() -> dict[str, tuple[Path, ...]]:
    """Return reports by subject, the newest first."""

    def date(file: Path) -> str:
        return file.stem.rsplit("_", 1)[1]

    found = {subject: REPORTS.glob(f"{subject}_*{GPUS}_*.md") for subject in SUBJECTS}
    return {subject: tuple(sorted(files, key=date, reverse=True)) for subject, files in found.items()}


def timed(model: str) -> str:
    """Return links to the newest report of each subject whose tables, title or commands name ``model``."""
    newest = (next((file for file in files if names(file.read_text(), model)), None) for files in timings().values())
    return ", ".join(f"[{file.stem}](../../benchmarks/reports/{file.name})" for file in newest if file is not None)


def names(report: str, model: str) -> bool:
    """Return whether a heading, the first cell of a row or a command names the model, as a whole word."""
    word = "|".join(re.escape(name) for name in (model, DATA["reports"].get(model, model)))
    exact = re.compile(rf"(?<![\w.-])(?:{word})(?![\w-]|\.\w)")
    lines = [line.strip() for line in report.splitlines()]
    headings = [line for line in lines if line.startswith("#")]
    cells = [line.split("|")[1] for line in lines if line.startswith("|")]
    commands = [line for line in lines if COMMAND in line and PARTS not in line]
    return any(exact.search(place) for place in headings + cells + commands)


def table(columns: Mapping[str, Callable[[T], str]], items: Iterable[T]) -> str:
    """Return a table with a row for each of ``items``, whose cells the functions of the columns make of it."""
    return grid(columns, (cells(columns, one) for one in items))


def cells(columns: Mapping[str, Callable[[T], str]], item: T) -> tuple[str, ...]:
    return tuple(make(item) or NONE for make in columns.values())


def grid(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns := tuple(columns), ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def replaced(document: str, name: str, tables: str) -> str:
    """Return ``document`` with ``tables`` between the marks of ``name``."""
    begin, end = f"<!-- {name}: ", f"<!-- end of {name} -->"
    before, rest = document.split(begin)
    program, rest = rest.split(" -->\n", 1)
    _, after = rest.split(end)
    return f"{before}{begin}{program} -->\n{tables}{end}{after}"
