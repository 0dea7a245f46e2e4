"""Clips that begin with a picture embed two timesteps, however many tokens there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models import two_timesteps
from pipelines.models.two_timesteps import of_tokens, two_of
from pipelines.run import load_pipeline
from tests.pipelines.models.test_gangs import TOLERANCE
from tests.pipelines.support.checkpoints import tiny, tiny_ltx
from tests.pipelines.support.references import own_clips
from tests.pipelines.support.references.video import Clip, pictures_of

from_picture = partial(Clip, num_pictures=1)


@pytest.mark.parametrize(
    ("clip", "layer"),
    [
        (from_picture(make=tiny.wan_per_token, reference=own_clips.wan_pipeline), "condition_embedder.time_proj"),
        (from_picture(make=tiny_ltx.ltx, reference=own_clips.timed_blocks), "time_embed.linear"),
        (from_picture(make=tiny_ltx.ltx2_few_layers, reference=own_clips.sounding_blocks), "time_embed.linear"),
    ],
)
def test_two_times_are_embedded_for_all_tokens(
    clip: Clip, layer: str, folders: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture's tokens have one timestep, and all others another."""
    monkeypatch.setattr(two_timesteps, "FEW", 2)
    checkpoint, num_rows = Checkpoint(folders(clip.make)), set[int]()
    model, request = checkpoint.denoiser(), clip.request(checkpoint.path)
    embedding: Any = model.modules["transformer"].get_submodule(layer)
    embedding.register_forward_hook(lambda _module, _args, x: num_rows.add(x.numel() // x.shape[-1]))
    pictures = pictures_of(clip.images(request))
    made = load_pipeline(checkpoint, TorchEngine(model)).denoise(request, pictures)
    assert num_rows == {2}
    assert relative_difference(made["latents"], clip.own(checkpoint.path)["latents"]) <= TOLERANCE


def test_a_third_time_is_no_number() -> None:
    """A job whose tokens have it fails, since its latents are not finite."""
    times_BL = torch.tensor([[0.0, 7.0, 7.0], [5.0, 0.0, 9.0], [4.0, 4.0, 4.0]])
    times_B2, rows_N = two_of(times_BL)
    expected_N = times_BL.flatten()
    expected_N[3] = torch.nan
    torch.testing.assert_close(of_tokens(times_B2[..., None], rows_N)[:, 0], expected_N, equal_nan=True)
