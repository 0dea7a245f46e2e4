"""A profile counts a model's work without its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import cast
from unittest.mock import patch

import pytest
import torch

from engines.core.attention import Kernel
from engines.core.spec import Scheme
from engines.planner.profile import profile, rough_flops
from engines.quantization.linear import swap_linears
from pipelines.checkpoint import Checkpoint
from tests.engines.support import models


@pytest.mark.parametrize(
    ("name", "lengths", "tera_flop", "untold"),
    [
        ("FLUX.1-dev", {"text": 512, "image": 4096, "joint": 4608}, 74.4, 0.001),
        ("FLUX.2-dev", {"text": 512, "image": 4096, "joint": 4608}, 282.6, 0.001),
        ("FLUX.2-klein-4B", {"text": 512, "image": 4096, "joint": 4608}, 34.8, 0.001),
        ("Qwen-Image", {"text": 512, "image": 4096}, 156.6 / 2, 0.001),
        ("Z-Image-Turbo", {"tokens": 4608}, 62.5, 0.07),
    ],
)
def test_published_models_cost_what_torch_counts(
    name: str, lengths: dict[str, int], tera_flop: float, untold: float
) -> None:
    """The reference is torch's count for diffusers' module at full size (``python -m benchmarks.model_step``). Size and
    prompt are 1024 x 1024 and 512 tokens. Four blocks of Z-Image see text or picture alone, whole on every rank: the
    count by its one stream of tokens omits their work."""
    counted = profile(Checkpoint.of_configuration(name, "cpu", torch.bfloat16).weightless())
    linears = sum((cost.split_flops + cost.whole_flops) * lengths[stream] for stream, cost in counted.streams.items())
    attention = 4 * 4608**2 * counted.hidden * counted.num_attentions
    found = (linears + attention) / 1e12
    assert tera_flop * (1 - untold) <= found <= tera_flop * 1.001


@pytest.mark.parametrize(
    ("name", "tera_flop"), [("MiniMax-H3", 3536.5), ("HunyuanVideo-1.5-480p_t2v", 1442.0), ("Cosmos3-Super", 6944.0)]
)
def test_a_rough_count_is_near_what_torch_counts(name: str, tera_flop: float) -> None:
    """The reference is PyTorch's count of a forward of the default clip."""
    checkpoint = Checkpoint.of_configuration(name, "cpu", torch.bfloat16)
    model, (branch, *_) = checkpoint.weightless(), checkpoint.largest_step(checkpoint.defaults.request())
    found = rough_flops(model, branch)
    assert 0.7 <= 1e12 * tera_flop / found <= 0.95


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_quantised_layers_change_no_rough_count(scheme: Scheme) -> None:
    model, (branch,) = models.model.__wrapped__("flux"), models.branches("flux", "even")
    before = rough_flops(model, branch)
    swap_linears(model.modules["transformer"], model.plan, scheme)
    assert rough_flops(model, branch) == before


def test_counts_the_published_model() -> None:
    """It has 11.9 B weights in 19 + 38 blocks."""
    flux = profile(Checkpoint.of_configuration("FLUX.1-dev", "cpu", torch.bfloat16).weightless())
    assert flux.weight_bytes / 2 / 1e9 == pytest.approx(11.9, abs=0.05)
    assert flux.num_attentions == 57
    assert flux.num_reductions == 19 * 4 + 38
    assert flux.num_key_heads == flux.num_heads == 24


def test_counts_full_width_norms_and_row_linears() -> None:
    wan = profile(models.model("wan"))
    assert wan.streams["video"].num_norms == 4 * 3  # the text's key norm does not grow with the video
    assert wan.num_reductions == 4 * (4 + 3)
    assert wan.streams["video"].reduced_features == 4 * 3 * wan.hidden


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_one_block_counts_for_all_that_are_equal(family: str) -> None:
    counted = profile(models.model(family))
    with patch("engines.planner.profile._signature", id):  # with no two equal, all run
        assert profile(models.model(family)) == counted


def test_counting_leaves_the_model_alone() -> None:
    denoiser = models.model("wan")
    before = {name: weight.device for name, weight in denoiser.modules["transformer"].named_parameters()}
    (branch,) = models.branches("wan", "even")
    with torch.no_grad():
        expected = denoiser.forward(denoiser.modules["transformer"], branch.inputs)
        profile(denoiser)
        again = denoiser.forward(denoiser.modules["transformer"], branch.inputs)
    assert torch.equal(expected, again)
    assert before == {name: weight.device for name, weight in denoiser.modules["transformer"].named_parameters()}


def test_counts_the_heads_of_keys() -> None:
    model = models.model("flux")

    def grouped(module: torch.nn.Module, kernel: Kernel) -> None:
        model.set_kernel(module, cast("Kernel", lambda q, k, v: kernel(q, k[:, :, :2], v[:, :, :2])))

    assert profile(replace(model, set_kernel=grouped)).num_key_heads == 2
