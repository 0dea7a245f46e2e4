"""Published models have names and their published configurations, and their plans cover them.

Places of a plan exist, and everything that a tensor axis should divide is divided once.
"""

from __future__ import annotations

import gc
import inspect
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from torch import nn

from engines.core.model import Branch
from engines.core.shard_plan import named_like
from engines.core.spec import ParallelSpec
from engines.parallel.mesh import team_of_one
from engines.parallel.tensor import split_features
from engines.tensorrt_engine.export.trace import offline_team
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_config, read_index
from pipelines.loading import ModelSource, published_models, resolve_configuration, shipped_checkpoints
from tests.pipelines.support.full_size import Kind, Recorded, first_step, model_on_gpu, trace
from tests.pipelines.support.real_configs import FLUX, WAN, model_of

REAL = FLUX | WAN
NEWER = {
    "Cosmos3-Nano": 15_191_503_104,
    "Cosmos3-Super": 64_047_272_192,
    "ERNIE-Image": 8_033_490_048,
    "FLUX.1-Kontext-dev": 11_901_408_320,
    "FLUX.2-dev": 32_223_281_152,
    "FLUX.2-klein-4B": 3_875_544_576,
    "FLUX.2-klein-9B": 9_078_581_248,
    "Helios-Base": 14_341_611_584,
    "HunyuanVideo-1.5-480p_i2v": 8_326_608_160,
    "HunyuanVideo-1.5-480p_t2v": 8_326_608_160,
    "HunyuanVideo-1.5-720p_i2v": 8_326_608_160,
    "HunyuanVideo-1.5-720p_t2v": 8_326_608_160,
    "Krea-2-Raw": 12_820_454_476,
    "Krea-2-Turbo": 12_820_454_476,
    "LTX-2": 18_876_174_592,
    "LTX-2.3": 18_988_838_144,
    "LTX-Video": 1_923_385_472,
    "MiniMax-H3": 33_140_215_040,
    "Qwen-Image": 20_430_401_088,
    "Qwen-Image-2.1": 7_115_124_736,
    "Qwen-Image-2512": 20_430_401_088,
    "Qwen-Image-Edit": 20_430_401_088,
    "Qwen-Image-Edit-2509": 20_430_401_088,
    "Qwen-Image-Edit-2511": 20_430_401_088,
    "Qwen-Image-Layered": 20_430_407_232,
    "Wan2.1-FLF2V-14B-720P": 16_424_075_584 + 2 * 257 * 1280,
    "Wan2.1-I2V-14B-480P": 16_424_075_584,
    "Wan2.1-VACE-14B": 17_367_104_576,
    "Wan2.2-I2V-A14B": 2 * 14_318_085_184,
    "Z-Image": 6_154_908_736,
    "Z-Image-Turbo": 6_154_908_736,
    "flux-3-image-klein": 5_548_692_992,
    "flux-3-image-klein-base": 5_538_469_376,
    "ideogram-4": 2 * 9_279_288_448,
    "stable-diffusion-3-medium": 2_028_328_000,
    "stable-diffusion-3.5-large": 8_056_627_520,
    "stable-diffusion-3.5-medium": 2_243_171_520,
    "stable-diffusion-xl-base-1.0": 2_567_463_684,
}
"""Parameters of the transformers (for Stable Diffusion XL the U-Net).

Cards and papers say, in billions: Cosmos 3 16 (with an encoder of pictures, which no generation uses) and 64;
ERNIE-Image 8; FLUX.1 12; FLUX.2 32, 4 and 9; Helios 14; HunyuanVideo 8.3; Krea 2 12; LTX-2 19; LTX-2.3 22 (with 3 in
its connectors, an encoder's part here); LTX-Video 2; MiniMax-H3 33; Qwen-Image 20 and 7; Wan 16 and twice 14 (Wan
VACE's files have 69.4 GB in float32); Z-Image 6; Stable Diffusion 3 2, 8 and 2.5; Stable Diffusion XL 2.6. One of
Ideogram 4's two transformers is a file of 9.28 GB in fp8.

Wan 2.1 VACE follows the ``config.json``, the schedule and the index of Wan-AI/Wan2.1-VACE-14B-diffusers. Wan,
LTX-Video, LTX-2 and 2.3, HunyuanVideo 1.5 and MiniMax-H3 follow huggingface/diffusers'
``scripts/convert_{wan,ltx,ltx2,hunyuan_video1_5,minimax_h3}_to_diffusers.py``. HunyuanVideo's ``task_type`` is that in
the model's name: the script has it wrong for 480p from text. Cosmos 3 Nano follows the ``config.json`` of
nvidia/Cosmos3-Nano; its schedule's shift is from diffusers' page about it. Super has the sizes of
``Qwen3-VL-32B-Instruct.json``, from which NVIDIA/cosmos-framework builds it. FLUX.1 Kontext is FLUX.1 dev for another
pipeline. FLUX.2 klein 9B has the sizes of ``Klein9BParams`` in ``src/flux2/model.py`` of black-forest-labs/flux2.
Qwen-Image-2512 is Qwen-Image with other weights, called alike on QwenLM/Qwen-Image's page. Qwen-Image's editors are
Qwen-Image for other pipelines, 2511 and Layered with the switches of diffusers' transformer. FLUX.3, Helios, Ideogram
4, Krea 2, Qwen-Image 2.1 and its auto-encoder have the default sizes of diffusers' classes. ERNIE-Image, Stable
Diffusion 3 and XL follow their ``config.json``, as others quote it. Missing schedules are diffusers' defaults.
"""
LONGEST = "stable-diffusion-3.5-medium"
"""A model that only diffusers outlines, in many seconds."""


def test_every_real_configuration_is_there() -> None:
    assert set(published_models()) == {*REAL, *NEWER}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one == LONGEST)) for one in NEWER])
def test_newer_models_have_as_many_parameters_as_they_should(name: str) -> None:
    weights = (weight for module in model_of(name).modules.values() for weight in module.parameters())
    assert sum(weight.nbytes for weight in weights) == 2 * NEWER[name], "in bfloat16"


OF_TRANSFORMERS = [one for one in published_models() if one != "stable-diffusion-xl-base-1.0"]


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_an_auto_encoder_of_other_latents_is_refused_when_the_model_is_opened(name: str, tmp_path: Path) -> None:
    """A U-Net's channels are found by its inputs."""
    folder = shutil.copytree(resolve_configuration(name), tmp_path / "model")
    config = Checkpoint(folder).path / "vae" / "config.json"
    vae = json.loads(config.read_text())
    key = "z_dim" if "z_dim" in vae else "latent_channels"
    config.write_text(json.dumps({**vae, key: vae[key] + 1}))
    message = f"makes {vae[key] + 1} channels of latents, and the transformer takes {vae[key]}: take the model's own"
    with pytest.raises(ValueError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_configuration_may_lack_what_its_class_has_by_default(name: str, tmp_path: Path) -> None:
    """Files written by hand, or by other versions of diffusers, lack keys."""
    folder = shutil.copytree(resolve_configuration(name), tmp_path / "model")
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text())
    usual = inspect.signature(getattr(diffusers, config["_class_name"]).__init__).parameters
    changed = {key: x for key, x in config.items() if key not in usual or usual[key].default != x}
    file.write_text(json.dumps(changed))
    Checkpoint(folder)


STEPS, GUIDANCE = "num_inference_steps", "guidance_scale"
OF_CARDS: dict[str, dict[str, float]] = {
    "FLUX.1-Kontext-dev": {GUIDANCE: 2.5},
    "FLUX.1-schnell": {STEPS: 4, GUIDANCE: 0.0},
    "FLUX.2-klein-4B": {STEPS: 4, GUIDANCE: 1.0},
    "FLUX.2-klein-9B": {STEPS: 4, GUIDANCE: 1.0},
    "Krea-2-Turbo": {STEPS: 8, GUIDANCE: 0.0},
    "Qwen-Image-Edit-2509": {STEPS: 40},
    "Qwen-Image-Edit-2511": {STEPS: 40},
    "Wan2.1-FLF2V-14B-720P": {GUIDANCE: 5.5},
    "Wan2.2-I2V-A14B": {STEPS: 40, GUIDANCE: 3.5},
    "Wan2.2-T2V-A14B": {STEPS: 40, GUIDANCE: 4.0},
    "Z-Image": {GUIDANCE: 4.0},
    "Z-Image-Turbo": {STEPS: 9, GUIDANCE: 0.0},
    "stable-diffusion-3.5-large": {GUIDANCE: 3.5},
    "stable-diffusion-3.5-medium": {STEPS: 40, GUIDANCE: 4.5},
}
"""Steps and guidance by which a model's card on the hub calls diffusers' pipeline, unless they are its defaults."""


BLOCKS_ALONE = {"MiniMax-H3", "flux-3-image-klein", "flux-3-image-klein-base"}
"""Models without a pipeline of diffusers that takes steps and guidance."""


@pytest.mark.parametrize("name", sorted({*published_models()} - BLOCKS_ALONE))
def test_steps_and_guidance_are_those_of_diffusers_or_of_the_card(name: str) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta")
    defaults, pipeline = checkpoint.defaults, getattr(diffusers, read_index(checkpoint.path)["_class_name"])
    said = {one.name: one.default for one in inspect.signature(pipeline.__call__).parameters.values()}
    counted = defaults.true_cfg_scale - defaults.guidance_offset
    is_distilled = defaults.guidance_scale > 0 or "true_cfg_scale" in said
    ours = {
        STEPS: defaults.num_inference_steps,
        GUIDANCE: defaults.guidance_scale if is_distilled else counted,
        "true_cfg_scale": defaults.true_cfg_scale,
    }
    differing = {key: value for key, value in ours.items() if said.get(key) is not None and said[key] != value}
    assert differing == OF_CARDS.get(name, {})


def test_weights_are_counted_without_being_there() -> None:
    name = "Wan2.2-I2V-A14B"
    assert Checkpoint.of_configuration(name, "meta", "bfloat16").weights_bytes() == 2 * NEWER[name]


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_configuration_is_the_published_one(name: str) -> None:
    path = resolve_configuration(name)
    read = {key: value for key, value in read_config(path, "transformer").items() if key != "_class_name"}
    assert read == REAL[name].config
    with torch.device("meta"):
        outline = Checkpoint.of_configuration(name, "meta").outline()
    assert len(outline.modules) == REAL[name].num_transformers
    for module in outline.modules.values():
        assert sum(weight.numel() for weight in module.parameters()) == REAL[name].num_parameters


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("FLUX.1-dev", {"text": 512, "image": 4096}),
        ("FLUX.1-schnell", {"text": 256, "image": 4096}),
        ("Wan2.1-T2V-14B", {"video": 21 * 45 * 80}),
        ("Wan2.2-TI2V-5B", {"video": 31 * 22 * 40}),
        ("Wan2.2-I2V-A14B", {"video": 21 * 30 * 52}),
        ("Wan2.1-I2V-14B-480P", {"video": 21 * 30 * 52}),
        ("Wan2.1-FLF2V-14B-720P", {"video": 21 * 45 * 80}),
        ("HunyuanVideo-1.5-480p_t2v", {"video": 31 * 30 * 53, "text": 1000 + 256}),
        ("LTX-2", {"video": 16 * 16 * 24}),
        ("Cosmos3-Nano", {"text": 300, "generated": 48 * 23 * 40 + 197}),
        ("HunyuanVideo-1.5-720p_i2v", {"video": 31 * 45 * 80, "text": 1000 + 256 + 729}),
        ("FLUX.1-Kontext-dev", {"text": 512, "image": 4096}),
        ("Qwen-Image-Edit-2511", {"text": 1024, "image": 2 * 83 * 83}),
        ("LTX-Video", {"video": 21 * 16 * 22}),
        ("Krea-2-Raw", {"tokens": 512 + 4096}),
        ("ERNIE-Image", {"tokens": 512 + 4096}),
        ("ideogram-4", {"tokens": 2048 + 128 * 128}),
        ("flux-3-image-klein", {"text": 80, "image": 4096, "seen": 0}),
        ("stable-diffusion-3.5-large", {"image": 4096, "text": 77 + 256}),
        ("MiniMax-H3+workflow@ref2va", {"tokens": 300 + 2 * 64 * 112 + 2 * 207 + 37 * 24 * 42}),
    ],
)
def test_tokens_of_the_default_size(name: str, tokens: dict[str, int]) -> None:
    assert model_of(name).stream_lengths(first_step(name)[0].arguments) == tokens


DIVIDED = {
    "Cosmos3-Nano": "tensor2",
    "FLUX.2-klein-4B": "tensor2",
    "HunyuanVideo-1.5-480p_i2v": "ulysses2",
    "Krea-2-Turbo": "ulysses2",
    "MiniMax-H3": "ring2",
    "MiniMax-H3+workflow@ref2va": "ulysses2",
    "Qwen-Image-2.1": "tensor2",
    "Qwen-Image-Edit-2511": "tensor2",
    "Wan2.1-I2V-14B-480P": "tensor2",
    "flux-3-image-klein": "ulysses2",
    "ideogram-4": "ulysses2",
}
"""How two ranks divide some of them: those with masks, with places of their own, or with values made once a job."""


SKIPPING = "spatio_temporal_guidance_blocks"
WORKFLOWS = ("MiniMax-H3+workflow@ref2va",)
"""Uses of published models with a transformer of their own."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make folders for workflows beside those of other tests."""
    with patch("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """Disable the garbage collector, which walks through all modules for a fifth of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def traced() -> set[Kind]:
    """Return the kinds of blocks traced so far, of any model: most differ in size alone."""
    return set()


def test_every_workflow_is_there() -> None:
    flows = {name: Checkpoint.of_configuration(name, "meta").spec.workflows for name in published_models()}
    assert tuple(str(ModelSource(base=name, workflow=flow)) for name, own in flows.items() for flow in own) == WORKFLOWS


def kind_of(name: str) -> str:
    """Return what decides a step's operations: classes, switches, and which numbers are set, not their size.

    This includes whether the default request is guided.
    """
    checkpoint = Checkpoint.of_configuration(name, "meta")
    index, defaults = read_index(checkpoint.path), checkpoint.defaults
    (part, *_) = (one for one in index if one.startswith(("transformer", "unet")))
    is_guided = defaults.true_cfg_scale > 1, defaults.guidance_scale > 0
    workflow = name.partition("+")[2]
    return repr((type(checkpoint.spec), workflow, index, is_guided, without_sizes(read_config(checkpoint.path, part))))


def without_sizes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_sizes(one) for key, one in sorted(value.items()) if key[0] != "_"}
    if isinstance(value, list):
        return [without_sizes(one) for one in value]
    return value > 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


STEPS_OF = [*published_models(), *WORKFLOWS]
FIRSTS = {kind: name for name in reversed(STEPS_OF) for kind in [kind_of(name)]}
"""The first model of each kind. A step of another one, in ``make test-slow``, differs in sizes alone."""


def on_first_block(branch: Branch) -> Branch:
    """Return ``branch`` for a model of one block: guidance by a pass without attention skips that block."""
    if SKIPPING not in branch.constants:
        return branch
    return replace(branch, constants={**branch.constants, SKIPPING: [0]})


def test_models_of_one_family_are_of_several_kinds() -> None:
    """Each transformer with a switch of its own is a first one."""
    assert len({kind_of("LTX-2"), kind_of("LTX-2.3")}) == 2
    assert len({kind_of(name) for name in ("FLUX.1-dev", "FLUX.1-schnell", "FLUX.1-Kontext-dev")}) == 3
    assert kind_of("Qwen-Image") == kind_of("Qwen-Image-2512")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in FIRSTS.values() else pytest.mark.slow) for one in STEPS_OF]
)
@torch.no_grad()
def test_a_step_is_what_a_gpu_can_record_and_compile(name: str, traced: set[Kind]) -> None:
    """It begins on the device, copies nothing from or to the host, and reads no values back."""
    model = model_on_gpu(name)
    branches = [on_first_block(branch) for branch in first_step(name)]
    for branch in {repr(sorted(one.constants.items())): one for one in branches}.values():
        recorded = Recorded(model, branch, team_of_one()).run()
        assert (recorded.found, recorded.is_recorded) == ([], True)
        if model.fast is not None:
            fast = Recorded(model, branch, team_of_one(), fast=True).run()
            assert (fast.found, fast.is_recorded) == ([], True)
        assert recorded.calls
        for kind in recorded.calls.keys() - traced:
            trace(model, recorded.calls[kind])
            traced.add(kind)


@pytest.mark.parametrize(
    ("name", "timestep"),
    [
        ("Cosmos3-Nano", 1),
        ("FLUX.1-Kontext-dev", 1),
        ("FLUX.2-klein-4B", 1),
        ("Helios-Base", 1),
        ("LTX-2", 16 * 16 * 24),
        ("LTX-Video", 21 * 16 * 22),
        ("MiniMax-H3", 2),
        ("Qwen-Image-2.1", 1),
        ("Wan2.2-TI2V-5B", 31 * 22 * 40),
        ("stable-diffusion-3.5-large", 1),
    ],
)
def test_a_step_begins_with_a_picture_on_a_gpu(name: str, timestep: int) -> None:
    """It mixes no host and device tensors. A given first frame has a timestep of its own."""
    assert {branch.inputs["timestep"].numel() for branch in first_step(name, num_pictures=1)} == {timestep}


@pytest.mark.parametrize("name", DIVIDED)
@torch.no_grad()
def test_two_ranks_record_it(name: str) -> None:
    """Steps over divided weights are not recorded if each of them makes values that others make once a job.

    Steps over divided tokens are hand-ordered if possible.
    """
    model = model_on_gpu(name)
    with offline_team(ParallelSpec.of(DIVIDED[name], 2)) as team:
        recorded = Recorded(model, first_step(name)[0], team, fast=model.fast is not None).run()
    assert recorded.is_recorded != (team.spec.divides_weights and recorded.model.reads_values)
    assert recorded.found == []


def test_folders_and_shipped_models_come_first(tmp_path: Path) -> None:
    own = tmp_path / "FLUX.1-dev"
    own.mkdir()
    assert resolve_configuration(str(own)) == own
    for name in shipped_checkpoints():
        assert (resolve_configuration(name) / "model_index.json").is_file()


def test_a_hub_id_is_the_published_model() -> None:
    ids = {
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": "HunyuanVideo-1.5-480p_t2v",
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "Wan2.2-I2V-A14B",
        "stabilityai/stable-diffusion-3-medium-diffusers": "stable-diffusion-3-medium",
        "flux.1-DEV": "FLUX.1-dev",
    }
    assert [resolve_configuration(one).name for one in ids] == list(ids.values())


CLIPS = [name for name in published_models() if name.startswith(("Cosmos", "Helios", "HunyuanVideo", "LTX", "Wan"))]
OTHERS = ["MiniMax-H3"]
"""Models whose auto-encoder decodes clips in pieces of 17 frames."""
SCALES = {"Qwen-Image-2.1": 16}


@pytest.mark.parametrize("name", CLIPS)
@torch.no_grad()
def test_auto_encoders_of_clips_have_the_scales_that_requests_are_made_by(name: str) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta")
    opened = OpenedPipeline(checkpoint.path, torch.device("meta"), torch.float32)
    with torch.device("meta"):
        vae = opened.outline("vae")
        channels = vae.config.get("z_dim") or vae.config["latent_channels"]
        clip_BCFHW = vae.decode(torch.zeros(1, channels, 2, 3, 4)).sample
    temporal, spatial = checkpoint.defaults.frame_multiple, clip_BCFHW.shape[-1] // 4
    assert clip_BCFHW.shape == (1, 3, 1 + temporal, 3 * spatial, 4 * spatial)
    assert checkpoint.defaults.size_multiple % spatial == 0


@pytest.mark.parametrize("name", sorted({*published_models()} - {*CLIPS, *OTHERS}))
def test_auto_encoders_of_pictures_have_the_scale_that_their_transformers_expect(name: str) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta")
    opened = OpenedPipeline(checkpoint.path, torch.device("meta"), torch.bfloat16)
    with torch.device("meta"):
        vae = opened.outline("vae")
    stages = vae.decoder.up_blocks
    enlarged = (getattr(stage, "upsamplers", None) or getattr(stage, "upsampler", None) for stage in stages)
    scale = 2 ** sum(bool(one) for one in enlarged)
    assert scale == SCALES.get(name, 8)
    assert checkpoint.defaults.size_multiple % (2 * scale) == 0


WHOLE = ("stable-diffusion-3.5-medium", "stable-diffusion-xl-base-1.0")
"""Models that are not divided."""
WITHOUT_TENSOR = ("ERNIE-Image", "Krea-2-Raw", "Krea-2-Turbo")
HEADS = {
    "ideogram-4": (2,),
    "Z-Image": (2,),
    "Z-Image-Turbo": (2,),
    "stable-diffusion-3.5-large": (2,),
    "Wan2.1-T2V-1.3B": (2, 4),
}
"""Degrees of a tensor axis; the other models have at least eight times some number of heads."""
MODULATION = re.compile(r"(norm\w*\.linear|_mod\.1|adaLN_modulation\.0|adaln_proj\.linear|adaln_modulation)$")
"""Linears of one vector, which every rank computes."""

BETWEEN_STACKS = re.compile(r"^vace_blocks\.\d+\.proj_(in|out)$")
"""Linears between Wan VACE's two stacks of blocks, from whole features to whole ones, computed on every rank.

They have 1.4 % of the weights.
"""


DIVISIBLE = [name for name in published_models() if name not in WHOLE]


@pytest.mark.parametrize("name", DIVISIBLE)
def test_places_exist(name: str) -> None:
    plan = model_of(name).plan
    for module in model_of(name).modules.values():
        assert all(isinstance(module.get_submodule(blocks), nn.ModuleList) for blocks in plan.blocks)
        for shard in plan.shards:
            for inner in named_like(module, shard.module):
                assert shard.where == "output" or shard.key in inspect.signature(inner.forward).parameters, shard
        for place in (*(gather.module for gather in plan.gathers), *(table.pattern for table in plan.tables)):
            assert named_like(module, place)


@pytest.mark.parametrize("name", DIVISIBLE)
def test_every_linear_of_the_tokens_is_divided_once(name: str) -> None:
    plan = model_of(name).plan
    assert (name in WITHOUT_TENSOR) == (not plan.linears)
    for module in model_of(name).modules.values() if plan.linears else ():
        for block in plan.blocks:
            for linear in linears_of(module, block):
                rules = [rule for rule in plan.linears if rule.matches(linear)]
                is_whole = MODULATION.search(linear) or BETWEEN_STACKS.search(linear)
                assert len(rules) == (0 if is_whole else 1), linear
        for rule in plan.linears:
            assert named_like(module, rule.pattern)


def linears_of(module: nn.Module, block: str) -> list[str]:
    named = module.get_submodule(block).named_modules(prefix=block)
    return [name for name, inner in named if isinstance(inner, nn.Linear)]


def test_keys_of_pictures_are_divided_where_a_model_has_them() -> None:
    (module,) = model_of("Wan2.1-I2V-14B-480P").modules.values()
    added = [name for name in linears_of(module, "blocks") if "add_" in name]
    assert len(added) == 2 * 40


@pytest.mark.parametrize("name", sorted({*DIVISIBLE} - {*WITHOUT_TENSOR}))
def test_features_divide_by_the_usual_degrees(name: str) -> None:
    model = model_of(name)
    for module in model.modules.values():
        for degree in HEADS.get(name, (2, 4, 8)):
            ParallelSpec(tensor=degree).check(num_heads=model.num_heads, features=split_features(module, model.plan))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_others_have_nothing_to_divide(name: str) -> None:
    assert not model_of(name).plan.shards
    assert not model_of(name).plan.linears
