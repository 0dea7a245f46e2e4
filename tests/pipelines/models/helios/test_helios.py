"""Helios on gangs of Gloo ranks equals the pipeline's own call: chunks of a clip, and steps inside each."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers.modular_pipelines.helios import denoise
from torch import Tensor

from engines.core.packing import pack
from engines.core.shard_plan import named_like
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.parallel.division import shape_of
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.helios.patches import block_noise_BCFHW
from pipelines.models.helios.spec import MAX_TOKENS, SPEC
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints import tiny_helios
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.video import Clip, named, pictures_of

TWO_CHUNKS = 1 + 9
"""Latent frames: one more than a chunk has."""


def own_chunks(folder: Path, request: MediaRequest, images: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return diffusers' latents with our noise of stages; its own fails on some CPUs
    (``test_noise_of_stages_is_diffusers_own``).
    """
    with patch.object(denoise, "sample_block_noise", block_noise_BCFHW):
        state = own_state(folder, request, **named(images), **SPEC.pipeline_inputs(folder, request))
    return {"latents": torch.cat(state.get("latent_chunks"), dim=2)}


FEW: dict[str, Any] = {"reference": own_chunks, "num_latent_frames": TWO_CHUNKS}
STAGES: dict[str, Any] = {**FEW, "sides": (1, 2), "changes": {"num_inference_steps": 4}}
CASES = {
    "in stages": Clip(make=tiny_helios.helios_pyramid, **STAGES),
    "words": Clip(make=tiny_helios.helios, strategies=("tensor", "pipeline", "hybrid", "guidance"), **FEW),
    "a picture": Clip(make=tiny_helios.helios, num_pictures=1, **FEW),
    "a clip": Clip(make=tiny_helios.helios, num_video_frames=35, **FEW),
    "scaled keys of the history": Clip(make=tiny_helios.helios_amplified, **FEW),
    "distilled, a picture": Clip(make=tiny_helios.helios_distilled, num_pictures=1, **STAGES),
    "distilled, a clip": Clip(make=tiny_helios.helios_distilled, num_video_frames=33, **STAGES),
}
SOME, *OTHERS = CASES
QUICK = {(SOME, 4, "ring"), (SOME, 2, "allgather_kv")}
"""Quick cases; the control without an exchange tests Ulysses."""
GANGS = [
    pytest.param(name, num_ranks, strategy, marks=() if (name, num_ranks, strategy) in QUICK else pytest.mark.slow)
    for name, case in CASES.items()
    for num_ranks in (1, 2, 4)
    for strategy in ((*CONTEXT, *case.strategies) if num_ranks > 1 else ("ulysses",))
    if (strategy, num_ranks) != ("pipeline", 4)
]
ALL = [SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.fixture(scope="module")
def expected(folders: Callable[[Any], Path]) -> Callable[[str], Tensor]:
    def of(name: str) -> Tensor:
        folder, request = folders(CASES[name].make), CASES[name].request(folders(CASES[name].make))
        return CASES[name].reference(folder, request, CASES[name].images(request))["latents"]

    return cache(of)


def states(pipeline: Pipeline, name: str, request: MediaRequest) -> Any:
    """Yield the states, each sent before the next step."""
    sampler = pipeline.sampler
    encoded = pipeline.text_encoder.encode(request, pictures_of(CASES[name].images(request)))
    pack(encoded, torch.device("cpu"))
    state = sampler.begin(request, encoded)
    ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
    for _ in range(sampler.num_steps(state)):
        pack(state, torch.device("cpu"))
        state = pickle.loads(pickle.dumps(state))
        state = sampler.advance(state, pipeline.engine.predict(sampler.branches(state), ranks))
        yield state


def denoised(folder: Path, name: str, strategy: str) -> Tensor:
    checkpoint = Checkpoint(folder)
    pipeline = load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy=strategy))
    *_, state = states(pipeline, name, CASES[name].request(folder))
    pipeline.engine.close()
    return torch.cat(pipeline.sampler.latents(state)["latent_chunks"], dim=2)


def without_exchange(folder: Path, name: str) -> Tensor:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised(folder, name, "ulysses")


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), GANGS)
def test_latents_equal_the_pipelines_own(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path], expected: Callable[[str], Tensor]
) -> None:
    for latents in gang(num_ranks).run(denoised, folders(CASES[name].make), name, strategy):
        assert latents.shape == expected(name).shape
        assert relative_difference(latents, expected(name)) <= TOLERANCE


def test_keys_of_the_text_are_made_once_a_job(
    folders: Callable[[Any], Path], expected: Callable[[str], Tensor]
) -> None:
    """They are made once for each prompt, whatever the number of chunks and steps."""
    checkpoint, made = Checkpoint(folders(CASES[SOME].make)), list[Tensor]()
    model, request = checkpoint.denoiser(), CASES[SOME].request(folders(CASES[SOME].make))
    layer: Any = model.modules["transformer"].get_submodule("blocks.0.attn2.to_k")
    layer.register_forward_hook(lambda _module, _args, output: made.append(output))
    latents = load_pipeline(checkpoint, TorchEngine(model)).denoise(request)
    assert len(made) == 2
    assert relative_difference(torch.cat(latents["latent_chunks"], dim=2), expected(SOME)) <= TOLERANCE
    num_layers, num_tokens = len(model.plan.blocks_of(model.modules["transformer"])), made[0].shape[1]
    assert 2 * num_layers * made[0].numel() * MAX_TOKENS == model.hoisted_numbers * num_tokens, "the planner's count"


def test_scaled_keys_have_the_models_dtype(folders: Callable[[Any], Path], expected: Callable[[str], Tensor]) -> None:
    """The class keeps the scales in float32. Its noise is float32 too, so bfloat16 gives nearly the same clip."""
    name = "scaled keys of the history"
    checkpoint = Checkpoint(folders(CASES[name].make), dtype=torch.bfloat16)
    *_, state = states(load_pipeline(checkpoint), name, CASES[name].request(checkpoint.path))
    made = torch.cat(checkpoint.sampler().latents(state)["latent_chunks"], dim=2)
    assert relative_difference(made, expected(name)) < 0.1


def test_without_the_exchange_they_do_not(folders: Callable[[Any], Path], expected: Callable[[str], Tensor]) -> None:
    for latents in gang(2).run(without_exchange, folders(CASES[SOME].make), SOME):
        assert relative_difference(latents, expected(SOME)) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_frames_and_previews_are_of_the_size_that_was_asked_for(name: str, folders: Callable[[Any], Path]) -> None:
    """Chunks make more frames than these. A preview shows the current chunk, at any stage."""
    folder = folders(CASES[name].make)
    checkpoint, request = Checkpoint(folder), CASES[name].request(folder)
    pipeline = load_pipeline(checkpoint)
    reached = list(states(pipeline, name, request))
    assert len(reached) == checkpoint.num_steps(request)
    for state in (reached[0], reached[-2]):
        preview = pipeline.decoder.preview(pipeline.sampler.preview(state), request)
        assert preview.shape == (1, request.height, request.width, 3)
    frames = pipeline.decoder.decode(pipeline.sampler.latents(reached[-1]), request)
    assert frames.shape == (request.num_frames, request.height, request.width, 3)
    assert frames.std() > 1


@pytest.mark.parametrize("name", ALL)
def test_a_gang_prepares_with_blank_steps(name: str, folders: Callable[[Any], Path]) -> None:
    """They have the shapes of real ones; the self-check has tokens that 8 ranks must pad."""
    folder = folders(CASES[name].make)
    checkpoint, request = Checkpoint(folder), CASES[name].request(folder)
    sampler, images = checkpoint.sampler(), CASES[name].images(request)
    state = sampler.begin(request, checkpoint.text_encoder().encode(request, pictures_of(images)))
    for blank, real in zip(checkpoint.first_step(request), sampler.branches(state), strict=True):
        shapes = [{key: (x.shape, x.dtype) for key, x in one.inputs.items()} for one in (blank, real)]
        assert shapes[0] == shapes[1]
    model = checkpoint.denoiser()
    probe = model.probe()
    assert len(probe) == 2
    assert any(number % 8 for number in model.stream_lengths(probe[0].arguments).values())


def test_a_gang_prepares_every_stage(folders: Callable[[Any], Path]) -> None:
    """The shapes are those of a job's steps. An estimate is for the largest."""
    folder = folders(CASES[SOME].make)
    checkpoint, request = Checkpoint(folder), CASES[SOME].request(folder)
    pipeline = load_pipeline(checkpoint)
    state = pipeline.sampler.begin(request, pipeline.text_encoder.encode(request))
    reached = [state, *states(pipeline, SOME, request)][:-1]
    shapes = dict.fromkeys(shape_of(pipeline.sampler.branches(one)[0]) for one in reached)
    size = Size(width=request.width, height=request.height, num_frames=request.num_frames)
    prepared = checkpoint.first_steps([size], ["transformer"])
    assert [shape_of(branch) for branch, *_ in prepared] == list(shapes)
    assert len(shapes) == 3
    assert shape_of(checkpoint.largest_step(request)[0]) == list(shapes)[-1]


def test_a_cache_of_predictions_is_refused(folders: Callable[[Any], Path]) -> None:
    """A chunk would begin with the last prediction of the one before it."""
    with pytest.raises(ValueError, match="cache is 'fast'; this model makes clips in chunks"):
        Checkpoint(folders(tiny_helios.helios)).defaults.request(cache="fast")


def test_noise_of_stages_is_diffusers_own() -> None:
    spec = find_spec("diffusers.modular_pipelines.helios.denoise")
    assert spec is not None
    assert spec.loader is not None
    own = module_from_spec(spec)  # the imported one already has ours
    spec.loader.exec_module(own)
    shape, gamma, patch_size = (1, 2, 3, 4, 6), 0.3, (1, 2, 2)
    seeded = [torch.Generator().manual_seed(3) for _ in range(2)]
    theirs = own.sample_block_noise(*shape, gamma, patch_size, torch.device("cpu"), seeded[0])
    ours = block_noise_BCFHW(*shape, gamma, patch_size, torch.device("cpu"), seeded[1])
    torch.testing.assert_close(ours, theirs)


def test_the_plan_covers_the_published_size() -> None:
    """The class's defaults are the published model, with 14 billion parameters."""
    from diffusers import HeliosTransformer3DModel

    with torch.device("meta"):
        module = HeliosTransformer3DModel()
    plan = SPEC.shard_plan(module.config)
    names = [name for name, _ in module.named_modules()]
    assert round(sum(weight.numel() for weight in module.parameters()) / 1e9) == 14
    assert all(any(rule.matches(name) for name in names) for rule in plan.linears)
    assert len(plan.blocks_of(module)) == 40
    for place in (*(shard.module for shard in plan.shards), *(gather.module for gather in plan.gathers)):
        assert named_like(module, place)
    small = Size(width=640, height=384)
    h, w = small.height // 8, small.width // 8
    history = {"short": 2, "mid": 2, "long": 16}
    call = {
        f"latents_history_{name}": torch.empty(1, 16, frames, h, w, device="meta") for name, frames in history.items()
    }
    call["hidden_states"] = torch.empty(1, 16, 9, h, w, device="meta")
    lengths = SPEC.stream_lengths(module.config, call)
    assert lengths == {"history": 2 * 24 * 40 + 12 * 20 + 4 * 6 * 10, "chunk": 9 * 24 * 40}
