"""Facts of published models: licence, parameters and memory, where they were seen and timed, and what they make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from torch import nn

from benchmarks.sweep.kept import DECODE_ERROR, ERROR, Kept, Result
from engines.core.model import DenoiserModel
from engines.parallel.pipeline import pipeline_blocks
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.loading import PUBLISHED

APACHE = "Apache-2.0"
FLUX1_DEV = "FLUX.1 [dev] Non-Commercial License"
FLUX = "FLUX Non-Commercial License"
FLUX3 = "FLUX Kommunity License"
HUNYUAN = "Tencent Hunyuan Community License"
COSMOS = "OpenMDW-1.1"
KREA = "Krea 2 Community License"
QWEN21 = "Qwen Research License"
STABILITY = "Stability AI Community License"
NOT_FOUND = "see its page"

LICENCES = {
    "Cosmos3": COSMOS,
    "ERNIE-Image": APACHE,
    "FLUX.1-Kontext-dev": FLUX1_DEV,
    "FLUX.1-dev": FLUX1_DEV,
    "FLUX.1-schnell": APACHE,
    "FLUX.2-dev": FLUX,
    "FLUX.2-klein-4B": APACHE,
    "FLUX.2-klein-9B": FLUX,
    "Helios": APACHE,
    "HunyuanVideo-1.5": HUNYUAN,
    "Krea-2": KREA,
    "LTX-2": "LTX-2 Community License",
    "LTX-2.5": "LTX-2.x Community License",
    "LTX-Video": "LTXV Open Weights License",
    "MiniMax-H3": "MiniMax H3 Community License",
    "Qwen-Image": APACHE,
    "Qwen-Image-2.1": QWEN21,
    "Wan2": APACHE,
    "Z-Image": APACHE,
    "flux-3-image-klein": FLUX3,
    "ideogram-4": "Ideogram Non-Commercial Model Agreement",
    "stable-diffusion-3": STABILITY,
    "stable-diffusion-xl": "CreativeML Open RAIL++-M",
}
"""Licences by the beginning of a model's name. The longest match counts."""
UNPUBLISHED = {
    "Cosmos3DistilledPipeline": "Cosmos3",
    "HeliosPyramidDistilledPipeline": "Helios",
    "HeliosPyramidPipeline": "Helios",
    "LTX25Pipeline": "LTX-2.5",
    "QwenImage21TurboPipeline": "Qwen-Image-2.1-Turbo",
}
"""Models of pipelines without a published configuration here."""


def licence_of(model: str) -> str:
    known = [name for name in LICENCES if model.startswith(name)]
    return LICENCES[max(known, key=len)] if known else NOT_FOUND


GIB = 2**30


def configuration(name: str) -> str:
    """Return the first model with the same configuration, which has the same weights."""
    parts = (json.loads(file.read_text()) for file in sorted((PUBLISHED / name).glob("*/config.json")))
    own = [part for part in parts if is_denoiser_class(part["_class_name"])]
    _SAME.setdefault(json.dumps(own), name)
    return _SAME[json.dumps(own)]


_SAME: dict[str, str] = {}


def is_denoiser_class(name: str) -> bool:
    return "Transformer" in name or name.startswith("UNet")


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
    return total / GIB


RESULTS = Path(__file__).parents[1] / "benchmarks" / "reports" / "sweep.jsonl"
NOT_YET = "not yet"
MOST_SAID = 160
"""Characters of a reason."""


def seen(model: str) -> str:
    """Return date, milliseconds a step and GPUs of each number of ranks, or why there are none; or "not yet"."""
    newest = {one["ranks"]: one for one in swept() if one["model"] == model}
    return "; ".join(said(newest[ranks]) for ranks in sorted(newest)) or NOT_YET


@cache
def swept() -> tuple[Result, ...]:
    return tuple(of_gpus(Kept(RESULTS).results()))


def of_gpus(results: Iterable[Result]) -> Iterable[Result]:
    return (one for one in results if one["hardware"] != "CPU")


def said(result: Result) -> str:
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


SERVED: Mapping[str, Callable[[Defaults], bool]] = {
    "text to picture": lambda one: one.kind == "image" and not one.min_pictures,
    "picture to picture": lambda one: one.kind == "image" and one.max_pictures > 0,
    "inpainting": lambda one: one.kind == "image" and one.takes_mask,
    "layers": lambda one: one.max_layers > 0,
    "text to clip": lambda one: one.kind == "video" and not (one.min_pictures or one.needs_source),
    "picture to clip": lambda one: one.kind == "video" and one.max_pictures > 0 and not one.needs_source,
    "clip to clip": lambda one: one.max_video_frames > 0 and not one.needs_source,
    "references to clip": lambda one: one.needs_source,
    "sound": lambda one: one.kind == "video" and one.make_sound,
}
WORDS = {
    "text to picture": ("text2image",),
    "picture to picture": ("image2image", "img2img", "image_conditioned"),
    "inpainting": ("inpaint",),
    "text to clip": ("text2video", "t2va"),
    "picture to clip": ("image2video", "flf2v", "fl2va", "condition$"),
    "clip to clip": ("video2video", "in_context"),
    "references to clip": ("ref2va",),
    "sound": ("sound", "t2va"),
}
"""Meaning of the names of workflows, as patterns in them."""
NOT_SERVED = ("controlnet", "ip_adapter", "action")
"""Marks of workflows for which no request brings what they want."""


def served(models: Iterable[Defaults]) -> list[str]:
    """Return what requests may ask of some of ``models``, in the order of ``SERVED``."""
    made = [one.of(kind) for one in models for kind in one.kinds]
    return [word for word, asks in SERVED.items() if any(map(asks, made))]


def beyond(declared: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return the workflows that are declared and not served. Those with one mark count as one, ``controlnet_…``."""
    known = set(words)
    rest = [_brief(flow) for flow in declared if not _meant(flow) <= known or not _meant(flow) or _is_marked(flow)]
    return list(dict.fromkeys(rest))


def _meant(flow: str) -> set[str]:
    return {word for word, marks in WORDS.items() if any(re.search(mark, flow) for mark in marks)}


def _is_marked(flow: str) -> bool:
    return any(mark in flow for mark in NOT_SERVED)


def _brief(flow: str) -> str:
    marks = ("ip_adapter", "controlnet_union", "controlnet")
    return next((f"{mark}_…" for mark in marks if flow.startswith(mark)), flow)


REPORTS = Path(__file__).parents[1] / "benchmarks" / "reports"
GPUS = "h[12]00"
"""In the names of reports of machines with GPUs, as a pattern."""
SUBJECTS = ("application", "denoise_step", "model_step", "pairs", "peers", "quad")
"""Subjects of reports that time whole transformers; others are of small models, or of parts."""
CALLED = {"Wan2.1-T2V-14B": "Wan2.1-14B"}
"""Names of models in reports, where they differ."""
COMMAND = "python -m benchmarks."
PARTS = "benchmarks.decode"
"""A program that times no steps."""


@cache
def timings() -> dict[str, tuple[Path, ...]]:
    """Return reports by subject, the newest first."""
    found = {subject: sorted(REPORTS.glob(f"{subject}_*{GPUS}_*.md"), key=_date, reverse=True) for subject in SUBJECTS}
    return {subject: tuple(files) for subject, files in found.items()}


def timed(model: str) -> str:
    """Return links to the newest report of each subject whose tables, title or commands name ``model``."""
    newest = (next((file for file in files if names(file.read_text(), model)), None) for files in timings().values())
    return ", ".join(f"[{file.stem}](../../benchmarks/reports/{file.name})" for file in newest if file is not None)


def names(report: str, model: str) -> bool:
    """Return whether a heading, the first cell of a row or a command names the model, as a whole word."""
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
