"""A checkpoint opens the right model, at the right time, and reads files once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engines.core.model import Branch
from pipelines.checkpoint import Checkpoint
from pipelines.loading import shipped_checkpoints
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.sample_requests import clip, picture


@pytest.fixture(params=["tiny_flux", "tiny_wan"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return Checkpoint(request.getfixturevalue(request.param))


def test_auto_is_the_dtype_of_the_device(tiny_flux: Path) -> None:
    assert Checkpoint(tiny_flux).dtype == torch.float32
    assert Checkpoint(tiny_flux, "cuda").dtype == torch.bfloat16
    assert Checkpoint(tiny_flux, dtype="float16").dtype == torch.float16
    with pytest.raises(ValueError, match="unknown dtype 'int4'"):
        _ = Checkpoint(tiny_flux, dtype="int4").dtype


@pytest.mark.parametrize("name", shipped_checkpoints())
def test_shipped_ones_go_by_name(name: str) -> None:
    assert Checkpoint.open(name).path.name == name
    assert Checkpoint.of_configuration(name).path == Checkpoint.open(name, weights=False).path


def test_a_published_name_is_enough_for_a_configuration_and_not_for_weights() -> None:
    assert Checkpoint.of_configuration("FLUX.1-dev").defaults.width == 1024
    with pytest.raises(ValueError, match=r"no model 'FLUX\.1-dev'"):
        Checkpoint.open("FLUX.1-dev")


def test_a_folder_of_another_kind_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        Checkpoint(tmp_path)


def test_the_sampler_is_loaded_once(checkpoint: Checkpoint) -> None:
    checkpoint.first_step(checkpoint.defaults.request())
    assert checkpoint.sampler() is checkpoint.sampler()


def test_a_denoiser_knows_the_lengths_of_the_typical_step(checkpoint: Checkpoint) -> None:
    defaults = checkpoint.defaults
    assert checkpoint.denoiser().typical_lengths is None
    lengths = checkpoint.denoiser(typical=defaults.request()).typical_lengths
    assert lengths is not None
    tokens = {"image": defaults.width * defaults.height // 64, "video": 21 * (defaults.width // 16) * (480 // 16)}
    assert max(lengths.values()) == tokens[defaults.kind]


def test_a_first_step_has_the_shapes_of_a_real_one(checkpoint: Checkpoint) -> None:
    request = (picture if checkpoint.defaults.kind == "image" else clip)(true_cfg_scale=2.0, negative_prompt="")
    conditioning = checkpoint.text_encoder().encode(request)
    real = checkpoint.sampler().branches(checkpoint.sampler().begin(request, conditioning))
    assert [shapes(branch) for branch in checkpoint.first_step(request)] == [shapes(branch) for branch in real]


def shapes(branch: Branch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (x.shape, x.dtype) for name, x in branch.inputs.items()}


def test_steps_of_sizes_are_in_order_for_every_transformer(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tiny.wan(tmp_path, boundary_ratio=0.875))
    sizes = [Size(width=64, height=32, num_frames=5), Size(width=32, height=32, num_frames=5)]
    steps = checkpoint.first_steps(sizes, checkpoint.denoiser().modules)
    assert [[branch.module for branch in step] for step in steps] == [[name] * 2 for name in TRANSFORMERS * 2]
    widths = [step[0].inputs["hidden_states"].shape[-1] for step in steps]
    assert widths[0] == widths[1] == 2 * widths[2] == 2 * widths[3]


TRANSFORMERS = ["transformer", "transformer_2"]


def test_an_unread_denoiser_weighs_what_a_read_one_does(checkpoint: Checkpoint) -> None:
    whole, unread = checkpoint.denoiser(), checkpoint.denoiser(sliced=True)
    weights = [weight for module in whole.modules.values() for weight in module.parameters()]
    assert checkpoint.weights_bytes() == sum(weight.nbytes for weight in weights)
    assert all(weight.is_meta for module in unread.modules.values() for weight in module.parameters())
    assert unread.device == torch.device("cpu")
    assert {x.device.type for branch in unread.probe() for x in branch.inputs.values()} == {"cpu"}


def test_defaults_are_read_without_torch(tiny_flux: Path) -> None:
    script = "import sys; from pathlib import Path; from pipelines.checkpoint import Checkpoint; "
    script += "Checkpoint(Path(sys.argv[1])).defaults; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, str(tiny_flux)], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "diffusers", "transformers"}
