"""Write the tables of docs/reference/models.md and of README: what diffusers has blocks for, and what is known of it.

PYTHONPATH=. python .ci/models_document.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks
from models_facts import (
    DATA,
    ERROR,
    NOT_FOUND,
    beyond,
    cells,
    counted,
    grid,
    licence_of,
    replaced,
    seen,
    served,
    swept,
    table,
    timed,
)
from models_proofs import CLIP_MARKS, CONTROL_MARKS, built, marked, proofs, uses, without_offload

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
README_COLUMNS = ("models", "from what to what", "divided by")
MODULAR = "ModularPipeline"
FAMILIES, OTHERS = DATA["families"], DATA["others"]
NOT_TRIED = "not tried: no model of it is here"
"""Cell of a pipeline without a model here."""


def document(written: str) -> str:
    """Return docs/reference/models.md with its tables made anew."""
    return replaced(with_pipelines(written), "published models", table(MODEL_COLUMNS, published_models()))


def with_pipelines(written: str) -> str:
    """Make all but the table of published models, whose weights take long to count."""
    titles = (*FAMILIES.values(), *OTHERS.values())
    return replaced(replaced(written, "uses", table(USE_COLUMNS, titles)), "pipelines", table(COLUMNS, names()))


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
    return next(spec.type_hint for spec in parts if {"transformer", "unet"} & set(spec.name.split("_")))


def loop_of(block: Any) -> Any:
    """Return the denoising loop inside ``block``, the first if it has several."""
    if isinstance(block, LoopSequentialPipelineBlocks):
        return block
    return next(filter(None, map(loop_of, block.sub_blocks.values())), None)


def models_of(name: str) -> list[str]:
    return [model for model in published_models() if pipeline_of(model) == name]


def once(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def proved_by(name: str) -> str:
    is_alone = strategies(transformer_of(name)) == "one rank"
    return ", ".join(str(proof.on_one_rank() if is_alone else proof) for proof in proofs().get(name, ()))


def once_a_job(name: str) -> str:
    """Return what a spec's ``hoisted`` returns: the first sentence of its docstring."""
    hoisted = load_spec(transformer_of(name).__name__).hoisted
    if not isinstance(hoisted, LazyFunction):
        return ""
    sentence = (inspect.getdoc(hoisted.target) or "").split(".")[0].removeprefix("Return ")
    return sentence[:1].upper() + sentence[1:]


@cache
def defaults_of(name: str) -> tuple[Defaults, ...]:
    """Return the defaults of a pipeline's published models, or of the small ones that tests build."""
    models = list(map(Checkpoint.of_configuration, models_of(name)))
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


def remark(members: Iterable[str]) -> str:
    """Return what the cell of these pipelines says if none of their models was seen on a GPU."""
    return "" if any(map(ran_on_a_gpu, members)) else "; not seen on a GPU"


def ran_on_a_gpu(name: str) -> bool:
    """Return whether a published model of the pipeline was seen on a GPU."""
    return any(one["model"] in models_of(name) and ERROR not in one for one in swept())


def title_of(name: str) -> str:
    (title,) = (title for mark, title in OTHERS.items() if name.startswith(mark))
    return title


def in_words(members: Iterable[str]) -> list[str]:
    return served(one for name in members for one in defaults_of(name))


@cache
def members_of(title: str) -> tuple[str, ...]:
    """Return the pipelines of a family, or those without one, by their title."""
    return tuple(name for name in names() if (FAMILIES.get(family_of(name)) or title_of(name)) == title)


def checkpoints_of(title: str) -> list[Checkpoint]:
    return [
        Checkpoint.of_configuration(model) for model in published_models() if pipeline_of(model) in members_of(title)
    ]


def files_of(use: str, title: str) -> str:
    return in_code(file for file, compared in uses()[use].items() if compared & set(members_of(title)))


def in_code(files: Iterable[str]) -> str:
    return ", ".join(f"`{file}`" for file in files) or "untested"


def recipes_of(title: str) -> str:
    known = once(name for one in checkpoints_of(title) for name in one.spec.recipes(one.path))
    return known and f"{known}: `../deployments/requests/test_recipes.py`"


def takes_clips(title: str) -> bool:
    return any(one.max_video_frames > 0 for name in members_of(title) for one in defaults_of(name))


def takes_control(title: str) -> bool:
    """Return whether a class of a model names a control network, which may lie apart from it."""
    return any(one.spec.control_part for one in checkpoints_of(title))


COLUMNS: dict[str, Callable[[str], str]] = {
    "pipeline": lambda name: f"`{shown(name)}`",
    "transformer": lambda name: f"`{transformer_of(name).__name__}`",
    "family": lambda name: family_of(name),
    "from what to what": lambda name: ", ".join(in_words([name])),
    "declared beyond": lambda name: ", ".join(beyond(workflows(name), in_words([name]))),
    "strategies": lambda name: (
        strategies(transformer_of(name)) + " (not captured)" * is_uncaptured(transformer_of(name))
    ),
    "once a job": once_a_job,
    "models": lambda name: ", ".join(models_of(name)),
    "licence": lambda name: once(map(licence_of, models_of(name) or [DATA["unpublished"].get(shown(name), NOT_FOUND)])),
    "proved by": proved_by,
}
"""Cells by column; a row is a modular pipeline."""
USE_COLUMNS: dict[str, Callable[[str], str]] = {
    "models": str,
    "recipes": recipes_of,
    "clip along": lambda title: in_code(marked(members_of(title), CLIP_MARKS)) if takes_clips(title) else "",
    "control picture": lambda title: in_code(marked(members_of(title), CONTROL_MARKS)) if takes_control(title) else "",
    **{use: partial(files_of, use) for use in ("adapters", "at run time", "quantised files")},
    "blocks in host memory": lambda title: (
        "" if without_offload() & set(members_of(title)) else files_of("blocks in host memory", title)
    ),
}
"""Cells by column; a row is a family, or a pipeline without one, by its title."""
SHARES = ("whole", "tensor 2", "tensor 4", "pipeline 2", "pipeline 4")
MODEL_COLUMNS: dict[str, Callable[[str], str]] = {
    "model": str,
    "pipeline": lambda model: f"`{shown(pipeline_of(model))}`",
    "parameters": lambda model: f"{counted(model)[0] / 1e9:.1f} B",
    **{share: lambda model, i=i: counted(model)[1][i] for i, share in enumerate(SHARES)},
    "timed": timed,
    "seen on a GPU": seen,
    "licence": licence_of,
}
"""Cells by column; a row is a published model."""
row = partial(cells, COLUMNS)


def readme(written: str) -> str:
    """Return README with its table of models made anew."""
    return replaced(written, "models", grid(README_COLUMNS, families()))


def families() -> Iterator[tuple[str, ...]]:
    """Yield a row for each family, and one for all other pipelines of which requests may ask the same."""
    for title in FAMILIES.values():
        members = members_of(title)
        assert members, f"no pipeline of {title}"
        known = {way for name in members for way in strategies(transformer_of(name)).split(", ")}
        words = ", ".join(in_words(members)) + remark(members)
        yield title, words, ", ".join(way for way in STRATEGIES if way in known - {"hybrid"})
    rows: dict[str, list[str]] = {}
    for name in (name for name in names() if not family_of(name)):
        rows.setdefault(", ".join(in_words([name])) or NOT_TRIED, []).append(name)
    for words, members in rows.items():
        words += "" if words == NOT_TRIED else remark(members)
        yield once(map(title_of, members)), words, "one rank a gang"


if __name__ == "__main__":
    OUT.write_text(document(OUT.read_text()))
    README.write_text(readme(README.read_text()))
