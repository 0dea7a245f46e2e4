"""Write docs/models.md: every pipeline that diffusers has blocks for, and what is known of it here.

python .ci/models_document.py
"""

from __future__ import annotations

import ast
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

from pipelines.blocks.tree import Sections
from pipelines.loading import PUBLISHED
from pipelines.models.registry import ARCHITECTURES, load_architecture

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "models.md"
CONTEXT = ("ulysses", "ring", "allgather_kv", "hybrid")
HEAD = """# Models

A pipeline is served if diffusers has *modular blocks* for it and they have one denoising loop, which may be over chunks
of a clip that are denoised one after the other (Helios). This table is written by
`python .ci/models_document.py` from what diffusers and the files in `pipelines/models/` say. Licences differ from model
to model, and between sizes of one model: read the one on the model's page before you serve it.

- *Workflows* are those that the blocks declare (— : they declare none, and have one).
- *Strategies* divide a step over the ranks of a gang. "one rank" serves one picture at a time on one GPU; more gangs
  serve more at once (`num_replicas`). "by diffusers' plan": diffusers says how, no file here.
- *Once a job* is what no step makes again.
- *Published* are models whose configuration comes with the project, with the weights of their transformers.
- *Proved by* are the tests that compare it with diffusers' own call. Without one, nobody has tried it here.

"""
COLUMNS = ("pipeline", "transformer", "family", "workflows", "strategies", "once a job", "published", "proved by")


def text() -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *filter(None, map(row, sorted({make() for make in makers()})))]
    return HEAD + "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def makers() -> Any:
    return MODULAR_PIPELINE_MAPPING.values()


def row(pipeline: str) -> tuple[str, ...] | None:
    """None for pipelines that make neither pictures nor clips, and whose blocks are not served."""
    blocks = getattr(diffusers, pipeline)().blocks
    if not {"images", "videos"} & {spec.name for spec in blocks.outputs}:
        return None
    try:
        denoise = blocks.sub_blocks[Sections.of(blocks).denoise]
    except ValueError:
        return None
    kinds = [spec.type_hint for spec in denoise.expected_components if is_denoiser(spec.name)]
    kind = kinds[0]
    architecture, name = load_architecture(kind.__name__), kind.__name__
    if architecture.mend is not None:
        architecture.mend(blocks)
    hoisted = architecture.hoisted
    once = (inspect.getdoc(hoisted) or "yes").splitlines()[0].rstrip(".") if hoisted is not None else "—"
    return (
        f"`{pipeline.replace('Modular', '')}`",
        f"`{name}`",
        architecture.family if name in ARCHITECTURES else "—",
        ", ".join(workflows(blocks)) or "—",
        strategies(kind),
        once,
        ", ".join(published(name)) or "—",
        ", ".join(proofs(name)) or "—",
    )


def is_denoiser(name: str) -> bool:
    return bool({"transformer", "unet"} & set(name.split("_")))


def workflows(blocks: Any) -> list[str]:
    try:
        return list(blocks.available_workflows)
    except NotImplementedError:
        return []


@cache
def strategies(kind: Any) -> str:
    """What the plan allows for the configuration that is the default of the class."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    config = {one.name: one.default for one in parameters if one.default is not one.empty}
    plan = load_architecture(kind.__name__).shard_plan(config)
    if not plan.shards:
        return "one rank"
    names = [*CONTEXT, "guidance", *(["tensor"] if plan.linears else []), *(["pipeline"] if plan.carried else [])]
    return ", ".join(names) + ("" if kind.__name__ in ARCHITECTURES else " (by diffusers' plan)")


@cache
def published(name: str) -> tuple[str, ...]:
    sizes = []
    for folder in sorted(PUBLISHED.iterdir()):
        configs = [json.loads(file.read_text()) for file in sorted(folder.glob("transformer*/config.json"))]
        if configs and configs[0]["_class_name"] == name:
            sizes.append(f"{folder.name} ({sum(map(num_parameters, configs)) / 1e9:.1f} B)")
    return tuple(sizes)


def num_parameters(config: Any) -> int:
    with torch.device("meta"):
        module = getattr(diffusers, config["_class_name"]).from_config(config)
    return sum(weight.numel() for weight in module.parameters())


@cache
def proofs(name: str) -> tuple[str, ...]:
    """Tests of models that call a builder of a tiny checkpoint of that class."""
    support, tests = ROOT / "tests" / "pipelines" / "support", ROOT / "tests" / "pipelines" / "models"
    builders = {builder for file in support.glob("**/tiny*.py") for builder in builders_of(file, name)}
    files = (file for file in sorted(tests.glob("test_*.py")) if builders & set(names_in(file)))
    return tuple(f"`{file.relative_to(ROOT / 'tests' / 'pipelines')}`" for file in files)


def builders_of(file: Path, name: str) -> set[str]:
    """Functions of ``file`` that name the class, and those that call them."""
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    inside = {function.name: set(names_of(function)) for function in functions}
    known = {builder for builder, names in inside.items() if name in names}
    return known | {builder for builder, names in inside.items() if names & known}


def names_in(file: Path) -> list[str]:
    return names_of(ast.parse(file.read_text()))


def names_of(tree: ast.AST) -> list[str]:
    """Names, attributes and parameters: fixtures are called ``tiny_<builder>``."""
    nodes = list(ast.walk(tree))
    plain = [node.id for node in nodes if isinstance(node, ast.Name)]
    inner = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    fixtures = [node.arg.removeprefix("tiny_") for node in nodes if isinstance(node, ast.arg) and "tiny_" in node.arg]
    imported = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [*plain, *inner, *fixtures, *imported]


if __name__ == "__main__":
    OUT.write_text(text())
