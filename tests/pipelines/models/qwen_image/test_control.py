"""Qwen-Image with a control network on gangs of Gloo ranks equals diffusers' pipeline as users call it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from engines.core.spec import ParallelSpec
from engines.core.tensors import relative_difference
from engines.parallel.division import shape_of
from engines.tensorrt_engine.export.trace import offline_team
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.directory import changed_at_s, read_index
from pipelines.loading import ModelSource
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints import tiny_qwen
from tests.pipelines.support.full_size import Recorded, first_step, model_on_gpu
from tests.pipelines.support.references.picture_cases import CONTROL_SIZE, PictureCase, drawn, pictures_of, request_of
from tests.pipelines.support.references.picture_cases import ran as ran
from training.latents import pack

SETTINGS = {"control_scale": 0.6, "control_guidance_start": 0.2, "control_guidance_end": 0.8}
CASE = PictureCase(
    make=tiny_qwen.qwen_controlled,
    pictures=(),
    has_control=True,
    num_steps=4,
    changes={"negative_prompt": "blue and green", **SETTINGS},
)
STRATEGIES = {1: ("ulysses",), 2: (*CONTEXT, "tensor", "guidance"), 4: ("hybrid", "tensor2xulysses2")}


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(CASE.make)


@pytest.fixture(scope="module")
def own(folder: Path) -> Tensor:
    """Return the latents of the classic pipeline, as tokens."""
    return own_latents(folder, request_of(CASE, folder))


def own_latents(folder: Path, request: MediaRequest) -> Tensor:
    pipeline = diffusers.QwenImageControlNetPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    latents: Tensor = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        true_cfg_scale=request.true_cfg_scale,
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        control_image=drawn(*CONTROL_SIZE, seed=7),
        controlnet_conditioning_scale=request.control_scale,
        control_guidance_start=request.control_guidance_start,
        control_guidance_end=request.control_guidance_end,
        generator=torch.Generator().manual_seed(request.seed),
        max_sequence_length=1024,
        output_type="latent",
    ).images
    return latents


def denoised(folder: Path, strategy: str) -> Tensor:
    checkpoint = Checkpoint(folder)
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy)
    latents: Tensor = ran(load_pipeline(checkpoint, engine), checkpoint, CASE)["latents"]
    return pack(latents[:, :, 0])


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_latents_equal_those_of_the_classic_pipeline(num_ranks: int, folder: Path, own: Tensor) -> None:
    assert own.std() > 0.1
    for strategy in STRATEGIES[num_ranks]:
        for latents in gang(num_ranks).run(denoised, folder, strategy):
            assert relative_difference(latents, own) <= TOLERANCE, strategy


@pytest.mark.parametrize(
    "change", [{"control_scale": 0.0}, {"control_guidance_start": 0.0}, {"control_guidance_end": 1.0}]
)
def test_each_setting_of_the_control_matters(change: dict[str, Any], folder: Path, own: Tensor) -> None:
    other = own_latents(folder, replace(request_of(CASE, folder), **change))
    assert relative_difference(other, own) > 10 * TOLERANCE


def test_steps_of_any_weight_share_a_shape(folder: Path) -> None:
    """One captured step serves them: the weight is an input, and the network is part of the step."""
    checkpoint = Checkpoint(folder)
    pipeline, request = load_pipeline(checkpoint), request_of(CASE, folder)
    states = list(pipeline.states(request, pictures_of(CASE)))[:-1]
    branches = [pipeline.sampler.branches(state)[0] for state in states]
    assert [float(branch.inputs["control.scale"]) for branch in branches] == pytest.approx([0, 0.6, 0.6, 0])
    assert len(set(map(shape_of, branches))) == 1


def test_without_a_control_picture_it_draws_as_without_the_network(
    folder: Path, folders: Callable[[Any], Path]
) -> None:
    case = replace(CASE, has_control=False, changes={})
    request = request_of(case, folder)
    with_network = load_pipeline(Checkpoint(folder)).denoise(request)["latents"]
    assert torch.equal(with_network, load_pipeline(Checkpoint(folders(tiny_qwen.qwen))).denoise(request)["latents"])


def test_gangs_warm_up_for_both(folder: Path, folders: Callable[[Any], Path]) -> None:
    numbers = []
    for path in (folder, folders(tiny_qwen.qwen)):
        checkpoint = Checkpoint(path)
        steps = checkpoint.first_steps([Size(width=64, height=64)], ["transformer"])
        numbers.append([any(name.startswith("control.") for name in step[0].inputs) for step in steps])
    with_network, plain = numbers
    assert plain == [False] * len(plain)
    assert with_network == [True] * len(plain) + plain


def test_a_folder_with_the_network_says_what_it_takes(folder: Path, folders: Callable[[Any], Path]) -> None:
    defaults, plain = Checkpoint(folder).defaults, Checkpoint(folders(tiny_qwen.qwen)).defaults
    assert defaults.capabilities == (*plain.capabilities, "control")
    assert (defaults.control_scale, defaults.takes_control_guidance, defaults.needs_control) == (1.0, True, False)
    with pytest.raises(ValueError, match="takes no control picture: leave control_image out"):
        plain.request(has_control=True)
    for setting in SETTINGS:
        with pytest.raises(ValueError, match=r"(needs?|without) a control picture: send one as control_image"):
            defaults.request(None, **{"has_control": False, setting: 0.5})


def test_the_network_counts_as_the_gangs_memory(folder: Path) -> None:
    """The encoder reads only its class and loads none of its weights."""
    checkpoint = Checkpoint(folder)
    module = checkpoint.denoiser().modules["transformer"]
    assert checkpoint.weights_bytes() == sum(weight.nbytes for weight in module.parameters())
    assert any(name.startswith("controlnet.") for name, _ in module.named_parameters())
    kinds = [type(one).__name__ for one in checkpoint.text_encoder().modules]
    assert "AutoencoderKLQwenImage" in kinds
    assert "QwenImageControlNetModel" not in kinds


def test_a_network_that_takes_a_mask_is_refused(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "masked")
    file = path / "controlnet" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra_condition_channels": 4}))
    with pytest.raises(ValueError, match="QwenImageControlNetInpaintPipeline"):
        _ = Checkpoint(path).defaults


@pytest.mark.parametrize(
    "strategy", ["tensor2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ulysses", "ulysses2"))]
)
@torch.no_grad()
def test_a_step_at_full_size_is_what_a_gpu_can_record(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins on the device, copies nothing from or to the host, and reads no values back."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "QwenImageControlNetModel", "num_layers": 5}))
    name = str(ModelSource(base="Qwen-Image", network=str(tmp_path)))
    branch, model = first_step(name)[0], model_on_gpu(name)
    assert branch.inputs["control.controlnet_cond"].shape == branch.inputs["hidden_states"].shape
    with offline_team(ParallelSpec.of(strategy, int(strategy[-1]) if strategy[-1].isdigit() else 1)) as team:
        recorded = Recorded(model, branch, team).run()
    assert (recorded.found, recorded.is_recorded) == ([], True)


@pytest.fixture
def apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a folder without a control network, and one of the network alone."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(folder, tmp_path / "model")
    network = Path(shutil.move(model / "controlnet", tmp_path / "network"))
    index = model / "model_index.json"
    own = {**json.loads(index.read_text()), "_class_name": "QwenImagePipeline"}
    del own["controlnet"]
    index.write_text(json.dumps(own))
    return model, network


def test_a_network_may_lie_apart(folder: Path, apart: tuple[Path, Path]) -> None:
    model, network = apart
    assert not Checkpoint(model).defaults.takes_control
    source = str(ModelSource(base=str(model), network=str(network)))
    joined = Checkpoint.open(source)
    assert Checkpoint.open(source).path == joined.path
    assert changed_at_s(joined.path) == changed_at_s(model)
    request = request_of(CASE, folder)
    assert joined.defaults == Checkpoint(folder).defaults
    pairs = (load_pipeline(one).denoise(request, pictures_of(CASE)) for one in (joined, Checkpoint(folder)))
    here, whole = (pair["latents"] for pair in pairs)
    assert torch.equal(here, whole)


def test_a_model_that_changes_is_joined_again(apart: tuple[Path, Path]) -> None:
    model, network = apart
    source = str(ModelSource(base=str(model), network=str(network)))
    before = Checkpoint.open(source)
    (model / "troupe.json").write_text(json.dumps({"num_inference_steps": 7}))
    index = model / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_diffusers_version": "0.0"}))
    after = Checkpoint.open(source)
    assert (after.path, after.defaults.num_inference_steps) == (before.path, 7)
    assert read_index(after.path)["_diffusers_version"] == "0.0"


def test_other_networks_and_models_are_refused(apart: tuple[Path, Path]) -> None:
    model, network = apart
    with pytest.raises(ValueError, match="is no control network of diffusers"):
        Checkpoint.open(str(ModelSource(base=str(model), network=str(model))))
    with pytest.raises(ValueError, match="give a folder of diffusers, or a hub id"):
        Checkpoint.open(str(ModelSource(base=str(model), network="nowhere")))
    with pytest.raises(ValueError, match="follows a QwenImageControlNetModel"):
        Checkpoint.open(str(ModelSource(base=str(model), network=str(model / "vae"))))
    with pytest.raises(ValueError, match="follows none by its blocks"):
        Checkpoint.open(str(ModelSource(base="flux-shapes", network=str(network))))


def test_no_pipeline_and_no_export_with_a_network(folder: Path, folders: Callable[[Any], Path]) -> None:
    """Its residuals are added between blocks, where stages meet; no export supports its step."""
    assert "runs with a control network" in Checkpoint(folder).eager_only(is_split=False)
    assert not Checkpoint(folders(tiny_qwen.qwen)).eager_only(is_split=False)
    with pytest.raises(RuntimeError, match=r"ValueError: .*pipeline"):
        gang(2).run(denoised, folder, "pipeline")
