"""``troupe demo``: make a picture, the same by a recipe, an edit and a clip over HTTP, with the shipped models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deployments.cli.client import Client
from deployments.cli.generate import Inputs, check_out, generate
from deployments.cli.progress import console, started_temporarily
from deployments.cli.serving import load_config

PICTURE = ("a small red circle above a large blue square on a white background", "picture.png")
BY_RECIPE = (PICTURE[0], "recipe.png")
EDIT = ("make the circle green", "edited.png")
CLIP = ("a green triangle moves from left to right on a black background", "clip.mp4")


def demo(out: Path, seed: int = 0) -> None:
    """Write two pictures, an edit and a clip to ``out``; print their paths and timings."""
    check_out(out / PICTURE[1])
    start_s = time.perf_counter()
    with started_temporarily(load_config("laptop")) as url, Client(url) as client:
        console.print(f"started in {time.perf_counter() - start_s:.1f} s")
        models, picture = client.models(), out / PICTURE[1]
        drawing = _first(models, "image")
        for (prompt, name), options, images in (
            (PICTURE, {"model": drawing}, []),
            (BY_RECIPE, {"model": drawing, "recipe": _recipe(models, drawing)}, []),
            (EDIT, {"model": _first(models, "image", edits=True)}, [picture]),
            (CLIP, {"model": _first(models, "video")}, []),
        ):
            generate(client, prompt, out / name, {**options, "seed": seed}, Inputs(images=images))
    console.print(f"everything took {time.perf_counter() - start_s:.1f} s")


def _first(models: Iterable[Mapping[str, Any]], kind: str, *, edits: bool = False) -> str:
    """Return the first model of ``kind`` that needs no picture, or (``edits``) needs one."""
    return next(
        str(model["id"])
        for model in models
        if model["kind"] == kind and bool(model["defaults"].get("min_pictures")) is edits
    )


def _recipe(models: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the first recipe of the model ``name``."""
    return next(str(recipe) for model in models if model["id"] == name for recipe in model["recipes"])
