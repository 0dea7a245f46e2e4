"""Write the tables of docs/reference/models.md and of README: what diffusers has blocks for, and what is known of it.

PYTHONPATH=. python .ci/models_document.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks
from models_facts import (
    ERROR,
    NOT_FOUND,
    UNPUBLISHED,
    beyond,
    counted,
    licence_of,
    replaced,
    seen,
    served,
    swept,
    table,
    timed,
)
from models_proofs import USE_COLUMNS, built, proofs, use_row

from engines.core.shard_plan import ShardPlan
from engines.core.spec import STRATEGIES
from pipelines.blocks.tree import Sections
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.directory import open_modular
from pipelines.loading import PUBLISHED, ModelSource, published_models
from pipelines.models.registry import FAMILY_FOLDERS, load_spec
from pipelines.models.spec import LazyFunction

ROOT = Path(__file__).parents[1]
OUT, README = ROOT / "docs" / "reference" / "models.md", ROOT / "README.md"
CONTEXT = ("ulysses", "ring", "allgather_kv", "hybrid")
COLUMNS = "pipeline|transformer|family|from what to what|declared beyond|strategies|once a job|models|licence|proved by"
MODEL_COLUMNS = "model|pipeline|parameters|whole|tensor 2|tensor 4|pipeline 2|pipeline 4|timed|seen on a GPU|licence"
README_COLUMNS = ("models", "from what to what", "divided by")
MODULAR = "ModularPipeline"
UNCAPTURED = " (not captured)"
"""Follows `tensor`, the last of the strategies."""
FAMILIES = {
    "flux": "FLUX.1 dev, schnell, Kontext",
    "flux2": "FLUX.2 dev, klein",
    "flux3": "FLUX.3 klein",
    "qwen": "Qwen-Image, -Edit, -Layered, 2.1",
    "z_image": "Z-Image, Z-Image-Turbo",
    "krea2": "Krea 2",
    "ernie_image": "ERNIE-Image",
    "ideogram4": "Ideogram 4",
    "sd3": "Stable Diffusion 3, 3.5",
    "wan": "Wan 2.1, 2.2",
    "hunyuan_video": "HunyuanVideo 1.5",
    "ltx": "LTX-Video",
    "ltx2": "LTX-2",
    "cosmos": "Cosmos 3",
    "minimax_h3": "MiniMax-H3",
    "helios": "Helios",
    "wan_animate2": "Wan Animate 2",
    "wan_vace": "Wan VACE",
}
"""Titles of families. A key is a `ModelSpec.family`."""
OTHERS = {"StableDiffusionXL": "Stable Diffusion XL", "Anima": "Anima"}
"""Titles of pipelines without a family. A key is the beginning of their names."""
NOT_TRIED = "not tried: no model of it is here"
"""Cell of a pipeline without a model here."""


def document(written: str) -> str:
    """Return docs/reference/models.md with its tables made anew."""
    models = table(MODEL_COLUMNS, map(model_row, published_models()))
    return replaced(with_pipelines(written), "published models", models)


def with_pipelines(written: str) -> str:
    """Make all but the table of published models, whose weights take long to count."""
    uses = table(USE_COLUMNS, use_rows())
    return replaced(replaced(written, "uses", uses), "pipelines", table(COLUMNS, filter(None, map(row, names()))))


def use_rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of families, and of pipelines without one, by their titles."""
    titles = {name: FAMILIES.get(family_of(name)) or title_of(name) for name in names()}
    for title in dict.fromkeys((*FAMILIES.values(), *OTHERS.values())):
        members = frozenset(name for name in names() if titles[name] == title)
        models = [model for model in published_models() if pipeline_of(model) in members]
        yield use_row(title, members, models, [one for name in members for one in defaults_of(name)])


@cache
def names() -> tuple[str, ...]:
    """Return diffusers' modular pipelines whose blocks are served and make pictures or clips."""
    found = (name for name in dir(diffusers) if name.endswith(MODULAR) and name != MODULAR)
    return tuple(sorted(name for name in found if transformer_of(name) is not None))


@cache
def blocks_of(name: str) -> Any:
    return getattr(diffusers, name)().blocks


@cache
def transformer_of(name: str) -> Any:
    """Return None for pipelines that make neither pictures nor clips, or whose blocks are not served."""
    blocks = blocks_of(name)
    if not {"images", "videos"} & {spec.name for spec in blocks.outputs}:
        return None
    try:
        denoise = blocks.sub_blocks[Sections.of(blocks).denoise]
    except ValueError:
        return None
    parts = loop_of(denoise).expected_components  # blocks before it may name another class
    return next(spec.type_hint for spec in parts if is_denoiser(spec.name))


def loop_of(block: Any) -> Any:
    """Return the denoising loop inside ``block``, the first if it has several."""
    if isinstance(block, LoopSequentialPipelineBlocks):
        return block
    return next(filter(None, map(loop_of, block.sub_blocks.values())), None)


def is_denoiser(name: str) -> bool:
    return bool({"transformer", "unet"} & set(name.split("_")))


def row(name: str) -> tuple[str, ...]:
    kind = transformer_of(name)
    ways_of = strategies(kind)
    hoisted = load_spec(kind.__name__).hoisted
    once = once_a_job(hoisted.target) if isinstance(hoisted, LazyFunction) else "—"
    models = [model for model in published_models() if pipeline_of(model) == name]
    return (
        f"`{shown(name)}`",
        f"`{kind.__name__}`",
        family_of(name) or "—",
        ", ".join(served(defaults_of(name))) or "—",
        ", ".join(beyond(workflows(name), served(defaults_of(name)))) or "—",
        ways_of + (UNCAPTURED if is_uncaptured(kind) else ""),
        once,
        ", ".join(models) or "—",
        ", ".join(dict.fromkeys(map(licence_of, models or [UNPUBLISHED.get(shown(name), NOT_FOUND)]))),
        ", ".join(str(proof.on_one_rank() if ways_of == "one rank" else proof) for proof in proofs().get(name, ()))
        or "—",
    )


def once_a_job(hoist: Any) -> str:
    """Return what ``hoist`` returns, by the first sentence of its docstring."""
    sentence = (inspect.getdoc(hoist) or "").split(".")[0].removeprefix("Return ")
    return sentence[:1].upper() + sentence[1:]


@cache
def defaults_of(name: str) -> tuple[Defaults, ...]:
    """Return those of a pipeline's published models, or of the small ones that tests build."""
    models = [Checkpoint.of_configuration(model) for model in published_models() if pipeline_of(model) == name]
    flows = (str(ModelSource(base=str(one.path), workflow=flow)) for one in models for flow in one.spec.workflows)
    published = tuple(one.defaults for one in (*models, *map(Checkpoint.of_configuration, flows)))
    return published or tuple(one.defaults for one in built() if one.pipeline == name)


def shown(name: str) -> str:
    return name.replace("Modular", "")


def family_of(name: str) -> str:
    kind = transformer_of(name).__name__
    return load_spec(kind).family if kind in FAMILY_FOLDERS else ""


def workflows(name: str) -> list[str]:
    blocks = blocks_of(name)
    spec = load_spec(transformer_of(name).__name__)
    spec.patch_blocks(blocks)
    try:
        flows = blocks.available_workflows
    except NotImplementedError:
        return []
    return [flow for flow in flows if not spec.control_part or not re.match(f"{spec.control_part}_(?!union)", flow)]


@cache
def strategies(kind: Any) -> str:
    """Return what the plan allows for the default configuration of the class."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    config = {one.name: one.default for one in parameters if one.default is not one.empty}
    known = ways(load_spec(kind.__name__).shard_plan(config))
    return ", ".join(known) + ("" if kind.__name__ in FAMILY_FOLDERS or len(known) < 2 else " (by diffusers' plan)")


def is_uncaptured(kind: Any) -> bool:
    """Return whether steps over divided weights are not captured: each makes what ``hoisted`` makes once."""
    return load_spec(kind.__name__).reads_values and "tensor" in strategies(kind).split(", ")


def ways(plan: ShardPlan) -> tuple[str, ...]:
    if not plan.shards and not plan.linears:
        return ("one rank",)
    tokens, features = CONTEXT if plan.shards else (), ("tensor",) if plan.linears else ()
    return (*tokens, "guidance", *features, *(("pipeline",) if plan.carried else ()))


@cache
def pipeline_of(model: str) -> str:
    """Return the modular pipeline that a published configuration opens as."""
    return type(open_modular(PUBLISHED / model)).__name__


def model_row(name: str) -> tuple[str, ...]:
    number, shares = counted(name)
    size = f"{number / 1e9:.1f} B"
    return name, f"`{shown(pipeline_of(name))}`", size, *shares, timed(name) or "—", seen(name), licence_of(name)


def readme(written: str) -> str:
    """Return README with its table of models made anew."""
    return replaced(written, "models", table(README_COLUMNS, families()))


def families() -> Iterator[tuple[str, ...]]:
    """Yield a row for each family, and one for all other pipelines of which requests may ask the same."""
    for family, title in FAMILIES.items():
        members = [name for name in names() if family_of(name) == family]
        assert members, f"no pipeline of family {family}"
        known = {way for name in members for way in strategies(transformer_of(name)).split(", ")}
        words = ", ".join(in_words(members)) + remark(members)
        yield title, words, ", ".join(way for way in STRATEGIES if way in known - {"hybrid"})
    rows: dict[str, list[str]] = {}
    for name in names():
        if not family_of(name):
            rows.setdefault(", ".join(in_words([name])) or NOT_TRIED, []).append(name)
    for words, members in rows.items():
        words += "" if words == NOT_TRIED else remark(members)
        yield ", ".join(dict.fromkeys(map(title_of, members))), words, "one rank a gang"


def remark(members: Iterable[str]) -> str:
    """Return what the cell of these pipelines says if none of their models was seen on a GPU."""
    return "" if any(map(ran_on_a_gpu, members)) else "; not seen on a GPU"


def ran_on_a_gpu(name: str) -> bool:
    """Return whether a published model of the pipeline was seen on a GPU."""
    models = {model for model in published_models() if pipeline_of(model) == name}
    return any(one["model"] in models and ERROR not in one for one in swept())


def title_of(name: str) -> str:
    (title,) = (title for mark, title in OTHERS.items() if name.startswith(mark))
    return title


def in_words(members: list[str]) -> list[str]:
    return served(one for name in members for one in defaults_of(name))


if __name__ == "__main__":
    OUT.write_text(document(OUT.read_text()))
    README.write_text(readme(README.read_text()))
