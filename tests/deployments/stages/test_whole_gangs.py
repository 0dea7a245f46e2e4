"""A pipeline that runs as a whole has stages that pass values along, and a rank with its own engine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deployments.cli.preflight import problems
from deployments.cli.serving import parse_config
from deployments.config import AppConfig
from deployments.ingress import make_cards
from deployments.model_config import ModelConfig
from deployments.service.interface import Output
from deployments.stages.common import StageSpec
from deployments.stages.rank import LoadRankParts
from deployments.stages.stage_config import DenoiserConfig
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from engines.core.engine import RankContext
from engines.core.parcel import Parcel
from engines.gang.gang_config import RankParts
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.deployments.support.live import config_of
from tests.engines.support.rank_resources import separate_rank_resources
from tests.pipelines.support.checkpoints import tiny_whole

CONTEXT = RankContext(rank=0, num_ranks=1, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whole.aura_flow(tmp_path_factory.mktemp("whole"))


def model_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "path": str(folder), "denoiser": {"num_ranks": 1}, **settings})


def denoised(parts: RankParts, request: MediaRequest, parcel: Parcel) -> Parcel:
    sampler = parts.sampler
    state = sampler.begin(request, parcel.open())
    for _ in range(sampler.num_steps(state)):
        state = sampler.advance(state, parts.engine.predict(sampler.branches(state), (0,)))
    return Parcel.of(sampler.latents(state))


def test_from_prompt_to_file_through_the_stages(folder: Path) -> None:
    model = model_of(folder)
    spec = StageSpec(model=model, stage=model.text_encoder, metadata="none")
    request = Checkpoint(folder).defaults.request(Size(width=64, height=64), prompt="a fox", num_inference_steps=2)
    with separate_rank_resources():
        parts = LoadRankParts(model=model)(CONTEXT)()
        latents = denoised(parts, request, PromptEncoder(spec).encode_valid(request))
        file = VaeDecoder(spec).decode(latents, request, Output(format="png")).data
    own_FHWC = load_pipeline(Checkpoint(folder)).run(request)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), own_FHWC[0])
    assert parts.engine.team_sizes == (1,)


def test_a_shape_is_warm_after_its_first_step(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    sampler, engine = checkpoint.sampler(), checkpoint.own_engine()
    assert engine is not None
    request = checkpoint.defaults.request(Size(width=64, height=64), num_inference_steps=2)
    state = sampler.begin(request, checkpoint.text_encoder().encode(request))
    was_warm = []
    for _ in range(2):
        engine.predict(sampler.branches(state), (0,))
        was_warm.append(engine.was_warm)
    assert was_warm == [False, True]


def test_its_card_says_so(folder: Path, pictures: Path) -> None:
    cards = make_cards(config_of({"whole": folder, "blocks": pictures}).app)
    assert {name: card.path for name, card in cards.items()} == {"whole": "whole pipeline", "blocks": "blocks"}
    assert cards["whole"].family == "AuraFlowPipeline"


@pytest.mark.parametrize(("fails", "forwards"), [(False, "compiled"), (True, "eager")])
def test_a_rank_compiles_its_pipeline_and_says_so(
    folder: Path, fails: bool, forwards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/pipelines/test_whole_compiled.py runs the compiler itself."""
    num_calls: list[int] = []

    def compiled(forward: Any, **_: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            num_calls.append(len(args))
            if fails:
                raise RuntimeError("no code for this processor")
            return forward(*args, **options)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    model = model_of(folder, denoiser={"num_ranks": 1, "compile": True, "warm_sizes": ["64x64"]})
    with separate_rank_resources():
        parts = LoadRankParts(model=model)(CONTEXT)()
    assert (parts.forwards, len(num_calls) > 0) == (forwards, True)
    request = Checkpoint(folder).defaults.request(Size(width=64, height=64), prompt="a fox", num_inference_steps=2)
    state = parts.sampler.begin(request, Checkpoint(folder).text_encoder().encode(request))
    parts.engine.predict(parts.sampler.branches(state), (0,))
    assert parts.engine.was_warm


def test_forwards_run_eagerly_unless_compile_is_set(folder: Path) -> None:
    with separate_rank_resources():
        assert LoadRankParts(model=model_of(folder))(CONTEXT)().forwards == "eager"
    eager, compiled = (
        make_cards(AppConfig(models=(model_of(folder, denoiser={"num_ranks": 1, "compile": compiles}),)))["m"]
        for compiles in (False, True)
    )
    assert (eager.forwards, compiled.forwards) == ("eager", None), "a gang says what became of it"


def test_compile_is_for_whole_pipelines(pictures: Path) -> None:
    model = ModelConfig(name="m", path=str(pictures), denoiser=DenoiserConfig(num_ranks=1, compile=True))
    said = r"denoiser\.compile is for whole pipelines, and flux runs by its blocks"
    with separate_rank_resources(), pytest.raises(ValueError, match=said):
        LoadRankParts(model=model)(CONTEXT)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"denoiser": {"num_ranks": 2}}, "num_ranks is 2"),
        ({"denoiser": {"num_ranks": 1, "precision": "fp8"}}, "precision is 'fp8'"),
        ({"denoiser": {"num_ranks": 1, "attention": "fp8"}}, "attention is 'fp8'"),
        ({"denoiser": {"num_ranks": 1, "warm_sizes": ["64x64"]}}, "warm_sizes is "),
        ({"recipes": {"quick": {"attention": "fp8"}}}, "attention of a recipe is 'fp8'"),
        ({"loras": [{"path": "owner/name"}]}, "loras is "),
        ({"runtime_loras": {}}, "runtime_loras is "),
        ({"decoder": {"num_devices": 2}}, "decoder.num_devices is 2"),
        ({"text_encoder": {"compile": True}}, "text_encoder.compile is True"),
        ({"text_encoder": {"offloads_layers": True}}, "text_encoder.offloads_layers is True"),
    ],
)
def test_what_it_does_not_support_is_said_at_start(folder: Path, settings: dict[str, Any], key: str) -> None:
    """``troupe serve`` and the rank raise it before weights are read."""
    model = model_of(folder, **settings)
    with separate_rank_resources(), pytest.raises(ValueError, match=rf"{key}.* AuraFlowPipeline runs as a whole"):
        LoadRankParts(model=model)(CONTEXT)
    document = config_of({"m": folder}).model_dump(mode="json")
    document["applications"][0]["args"]["models"] = [{"name": "m", "path": str(folder), **settings}]
    found = list(problems(parse_config(document)))
    assert any(key in problem and "runs as a whole" in problem for problem in found), found
