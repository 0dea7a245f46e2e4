"""Tiny models of this year's architectures run in the whole application, on gangs of rank actors.

Pictures over HTTP equal those of diffusers' own call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.size import Size
from tests.deployments.support.live import config_of, live, picture, pixels_of
from tests.pipelines.support.checkpoints import tiny_cosmos, tiny_models, tiny_others
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.own_clips import guided_blocks

MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "klein": tiny_models.flux2_klein,
    "qwen": tiny_models.qwen_image,
    "z-image": tiny_models.z_image,
    "sd3": tiny_others.sd3,
}
AVOIDED = {"qwen": " ", "sd3": ""}
"""Negative prompts that are used if a request has none: of Qwen-Image's card and of SD3's pipeline in diffusers."""
STEPS = 2
SEED = 5
LARGEST_DIFFERENCE = 1
"""Levels of 255: sums are added in another order, and a value may lie on either side of a whole number."""


def request_of(folder: Path) -> MediaRequest:
    """Return a request for a picture whose tokens ranks must pad, with guidance if the model has it."""
    defaults = Checkpoint(folder).defaults
    size = Size(width=5 * defaults.size_multiple, height=3 * defaults.size_multiple)
    return defaults.request(size, prompt="a red circle", num_inference_steps=STEPS, seed=SEED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "num_ranks"), [(("klein", "qwen"), 2), (("z-image", "sd3"), 2), (("klein", "qwen"), 4)]
)
def test_pictures_are_those_of_diffusers(
    names: tuple[str, ...], num_ranks: int, tmp_path: Path, ray_cluster: None
) -> None:
    folders = {name: MAKERS[name](tmp_path / name) for name in names}
    with live(config_of(folders, num_ranks=num_ranks)) as url:
        for name, folder in folders.items():
            request = request_of(folder)
            expected = own_state(folder, replace(request, negative_prompt=AVOIDED.get(name))).get("images")
            pixels = 255 * expected[0].movedim(0, -1).float().numpy()
            assert pixels.std() > 1
            served = pixels_of(
                picture(
                    url,
                    model=name,
                    prompt=request.prompt,
                    size=f"{request.width}x{request.height}",
                    num_inference_steps=STEPS,
                    seed=SEED,
                )
            )
            assert np.abs(served - pixels).max() <= LARGEST_DIFFERENCE, name


@pytest.mark.slow
def test_a_model_of_clips_draws_a_picture_as_diffusers_does(tmp_path: Path, ray_cluster: None) -> None:
    folder = tiny_cosmos.cosmos_with_sound(tmp_path / "clips")
    own = {"width": 32, "height": 32, "num_frames": 5, "picture_width": 48, "picture_height": 32}
    (folder / "troupe.json").write_text(json.dumps(own))
    request = Checkpoint(folder).defaults.of("image").request(prompt="a red circle", num_inference_steps=2, seed=SEED)
    pixels = 255 * guided_blocks(folder, request, ())["videos"][0].movedim(0, -1).float().numpy()
    assert pixels.std() > 1
    with live(config_of({"clips": folder})) as url:
        wanted = {"prompt": request.prompt, "size": "auto", "num_inference_steps": STEPS, "seed": SEED}
        served = pixels_of(picture(url, model="clips", **wanted))
    assert np.abs(served - pixels).max() <= LARGEST_DIFFERENCE
