"""``troupe demo``: a picture and a clip from words, through the real HTTP server, with both shipped models."""

from __future__ import annotations

import time
from pathlib import Path

from deployments.cli.client import Client
from deployments.cli.generate import generate
from deployments.cli.progress import console, started_for_itself
from deployments.cli.serving import load_config

PICTURE = ("image", "a small red circle above a large blue square on a white background", "picture.png")
CLIP = ("video", "a green triangle moves from left to right on a black background", "clip.mp4")


def demo(out: Path, seed: int = 0) -> None:
    """Writes ``out/picture.png`` and ``out/clip.mp4``; prints where they are and where the time went."""
    begun_s = time.perf_counter()
    with started_for_itself(load_config("laptop")) as url, Client(url) as client:
        console.print(f"started in {time.perf_counter() - begun_s:.1f} s", highlight=False)
        models = {model["kind"]: model["id"] for model in client.models()}
        for kind, prompt, name in (PICTURE, CLIP):
            generate(client, prompt, out / name, {"model": models[kind], "seed": seed})
    console.print(f"everything took {time.perf_counter() - begun_s:.1f} s", highlight=False)
