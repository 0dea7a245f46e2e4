"""Draw the picture at the top of the README: one prompt a tile, all with the same seed, by the bare pipeline.

python .ci/readme_picture.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline

MODEL, SEED, SIDE = "flux-shapes", 2, 128
PROMPTS = (
    "a large red circle at the top left, yellow background",
    "a yellow star at the bottom left, black background",
    "a large green triangle in the centre, purple background",
    "a large purple star in the centre, white background",
    "a small white star at the top, blue background",
    "a large orange square at the right, green background",
)
OUT = Path(__file__).parents[1] / "docs" / "images" / "pictures.png"


def request(prompt: str) -> MediaRequest:
    return MediaRequest(
        request_id="readme",
        model=MODEL,
        kind="image",
        prompt=prompt,
        width=SIDE,
        height=SIDE,
        num_inference_steps=20,
        guidance_scale=3.5,
        true_cfg_scale=1.0,
        seed=SEED,
    )


def main() -> None:
    torch.set_num_threads(1)
    pipeline = load_pipeline(Checkpoint.open(MODEL))
    tiles = [pipeline.run(request(prompt))[0] for prompt in PROMPTS]
    OUT.parent.mkdir(exist_ok=True)
    Image.fromarray(np.concatenate(tiles, axis=1)).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
