"""Clients request clips in two passes by separate fields, or by a recipe."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.clips.database import request_from_json, to_json
from deployments.clips.eta import duration_key
from deployments.config import AppConfig
from deployments.ingress import make_cards
from deployments.model_config import ModelConfig
from deployments.requests.handle import handle_request
from deployments.requests.recipe_choice import recipe_document
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import check_kept
from deployments.service.interface import ModelCard
from deployments.stages.denoiser import shape_of
from deployments.stages.replica_load import ReplicaLoad, kind_of, new_work
from engines.gang.eta.measured_times import StepTimes
from engines.gang.jobs.job import Job, JobDone, LastStage
from engines.gang.load import GangLoad, rank_gangs
from pipelines.checkpoint import Checkpoint
from pipelines.loading import PUBLISHED, resolve_path
from pipelines.media.metadata import TROUPE, MetadataWriter
from pipelines.preconditions import weight_problems
from pipelines.request import Lora, MediaRequest, SecondStage, mix_of
from pipelines.solver import Solver
from tests.engines.gang.support.plans import scheduler

SIGMAS = [0.909375, 0.725, 0.421875]
UPSAMPLER = {"_class_name": "LTX2LatentUpsamplerModel", "rational_spatial_scale": 2.0}
ADAPTERS = [{"name": "distilled", "path": "a.safetensors"}, {"name": "ink", "path": "b.safetensors", "scale": 0.5}]
RECIPES: dict[str, Any] = {
    "two-stages": {"path": "c.safetensors", "scale": 0.8, "lora": [{"name": "ink"}]},
    "two-stages-distilled": {"second_stage_lora": [{"name": "ink", "scale": 0.3}]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = shutil.copytree(PUBLISHED / "LTX-2.3", tmp_path_factory.mktemp("model") / "LTX-2")
    (made / "latent_upsampler").mkdir()
    (made / "latent_upsampler" / "config.json").write_text(json.dumps(UPSAMPLER))
    return made


@pytest.fixture(scope="module")
def card(folder: Path) -> ModelCard:
    return cards_of(folder)["ltx"]


def cards_of(folder: Path, **changes: Any) -> dict[str, ModelCard]:
    model = {"name": "ltx", "path": str(folder), "loras": ADAPTERS, "recipes": RECIPES, **changes}
    return dict(make_cards(AppConfig(models=(ModelConfig(**model),))))


def asked(card: ModelCard, **fields: Any) -> MediaRequest:
    request, *_ = handle_request({"ltx": card}, "id", {"prompt": "a", "kind": "video", **fields})
    return request


def test_a_recipe_makes_two_passes(card: ModelCard) -> None:
    request = asked(card, recipe="two-stages")
    distilled = Lora(name="two-stages", scale=0.8)
    assert request.second_stage == SecondStage(scale=2.0, sigmas=tuple(SIGMAS), loras=(distilled,))
    assert (request.width, request.height) == (2 * card.defaults.width, 2 * card.defaults.height)
    first, last = request.stages
    assert (first.width, first.height) == (card.defaults.width, card.defaults.height)
    assert (first.loras, first.solver) == ((Lora(name="ink"),), Solver())
    assert (first.num_inference_steps, first.true_cfg_scale) == (card.defaults.num_inference_steps, 3.0)
    assert (last.width, last.height, last.loras) == (request.width, request.height, (distilled,))
    assert (last.num_inference_steps, last.true_cfg_scale) == (3, 1.0)
    assert last.solver == Solver(flow_shift=1.0, sigmas=tuple(SIGMAS))
    assert card.defaults.num_steps_of(request) == card.defaults.num_inference_steps + 3


def test_a_distilled_checkpoint_has_a_recipe_of_its_own(card: ModelCard) -> None:
    request = asked(card, recipe="two-stages-distilled")
    assert [len(stage.solver.sigmas) for stage in request.stages] == [8, 3]
    assert [stage.loras for stage in request.stages] == [(), (Lora(name="ink", scale=0.3),)]
    assert card.defaults.num_steps_of(request) == 8 + 3


def test_requests_may_say_it_themselves(card: ModelCard) -> None:
    plain = asked(card)
    assert (plain.second_stage, plain.stages) == (None, (plain,))
    fields: dict[str, Any] = {"second_stage_sigmas": [0.5], "second_stage_lora": [{"name": "ink"}]}
    request = asked(card, size="1024x768", **fields)
    assert (request.width, request.height) == (1024, 768)
    assert request.second_stage == SecondStage(scale=2.0, sigmas=(0.5,), loras=(Lora(name="ink", scale=0.5),))
    named = asked(card, recipe="two-stages", **fields)
    ink, own = Lora(name="ink", scale=0.5), Lora(name="two-stages", scale=0.8)
    assert named.second_stage == SecondStage(scale=2.0, sigmas=(0.5,), loras=(ink, own))


def test_recipes_are_listed_with_the_adapters_of_each_pass(card: ModelCard) -> None:
    assert recipe_document("two-stages", card.recipes["two-stages"], card) == {
        "second_stage_sigmas": tuple(SIGMAS),
        "lora": [{"name": "ink", "scale": 1.0}],
        "second_stage_lora": [{"name": "two-stages", "scale": 0.8}],
    }


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"second_stage_sigmas": [0.5, 0.7]}, "second_stage_sigmas", r"is \[0.5, 0.7\]: it must fall from at most 1"),
        ({"second_stage_lora": [{"name": "ink"}]}, "second_stage_lora", "give second_stage_sigmas as well"),
        ({"recipe": "two-stages", "second_stage_lora": [{"name": "oil"}]}, "lora", "without an adapter 'oil'"),
        ({"recipe": "two-stages", "size": "1056x768"}, "size", "positive multiples of 64"),
        ({"recipe": "two-stages", "num_frames": 1}, "second_stage_sigmas", "num_frames is 1"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], param: str, told: str, card: ModelCard) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        asked(card, **fields)
    assert caught.value.param == param


def test_a_clip_that_comes_along_has_one_pass(card: ModelCard) -> None:
    request = replace(asked(card, recipe="two-stages"), num_video_frames=25)
    with pytest.raises(ValueError, match="not for requests with an input clip"):
        card.defaults.check(request)


def test_a_model_without_an_upsampler_refuses_it() -> None:
    card = cards_of(PUBLISHED / "LTX-2.3", recipes={})["ltx"]
    assert card.defaults.stage_scale == 0
    with pytest.raises(RequestError, match="need a model with a latent upsampler, and this one has none"):
        asked(card, second_stage_sigmas=SIGMAS)
    with pytest.raises(ValueError, match="the recipe two-stages changes nothing"):
        cards_of(PUBLISHED / "LTX-2.3", recipes={"two-stages": {}})


def test_a_kept_request_is_the_same_after_a_restart(card: ModelCard) -> None:
    request = asked(card, recipe="two-stages")
    assert request_from_json(to_json(request)) == request
    check_kept(request, card)
    gone = replace(card, loras=tuple(lora for lora in card.loras if lora.name != "two-stages"))
    with pytest.raises(ValueError, match="would refuse it: ltx is served without an adapter 'two-stages'"):
        check_kept(request, gone)


def test_the_file_says_how_it_was_made(card: ModelCard) -> None:
    request = asked(card, recipe="two-stages")
    written = json.loads(MetadataWriter(level="full", software="troupe").texts(request)[TROUPE])
    assert written["size"] == "1536x1024"
    assert written["lora"] == [{"name": "ink", "scale": 1.0}]
    assert written["second_stage_sigmas"] == SIGMAS
    assert written["second_stage_lora"] == [{"name": "two-stages", "scale": 0.8}]
    again = asked(card, **{name: written[name] for name in written if name.startswith("second") or name == "size"})
    assert again.second_stage == request.second_stage


def test_both_passes_count_where_requests_are_told_apart(card: ModelCard) -> None:
    one, two = asked(card, size="1536x1024"), asked(card, recipe="two-stages", lora=[{"name": "ink", "scale": 0.0}])
    assert new_work(one).kind != new_work(replace(two, loras=())).kind
    assert new_work(two).kind != new_work(two).last_kind == kind_of(two.stages[1])
    assert duration_key(one) != duration_key(two)
    assert new_work(two).num_steps == new_work(one).num_steps + 3
    assert mix_of(two.all_loras) == mix_of(two.second_stage.loras)  # type: ignore[union-attr]


SMALL_S, LARGE_S = 2.0, 10.0
"""Seconds of a step of each size."""


def job_of(request: MediaRequest) -> Job:
    """Return a job like a denoiser's."""
    first, *later = request.stages
    last = [LastStage(num_steps=one.num_inference_steps, shape=shape_of(one, ())) for one in later]
    num_steps = sum(one.num_inference_steps for one in request.stages)
    shape, stage = shape_of(first, ()), last[0] if last else None
    return Job(job_id="j", request=request, conditioning=None, num_steps=num_steps, shape=shape, last_stage=stage)


def test_predicted_seconds_of_one_pass_and_of_two_stay_right(card: ModelCard) -> None:
    """A gang has measured times after requests in any order: an average over both passes would be wrong."""
    times, width = StepTimes(), card.defaults.width

    def work_s(job: Job) -> float:
        return scheduler(num_ranks=1, prediction=times.prediction()).work_s(job)

    stub: Any = SimpleNamespace(config=SimpleNamespace(policy="shortest"), open_work=dict, work_s=work_s)
    stub.wake_s, stub.switch_s, stub.additions = 0.0, 0.0, ()
    load, small = ReplicaLoad(stub, start_s=1.0, node_id="0a", head_id="0b"), asked(card, true_cfg_scale=1)
    large = asked(card, size=f"{2 * width}x{2 * card.defaults.height}", true_cfg_scale=1)
    two = [asked(card, num_inference_steps=number, second_stage_sigmas=SIGMAS, true_cfg_scale=1) for number in (8, 30)]
    done = JobDone(job_id="j", latents=None, queue_s=0, denoise_s=0, was_warm=True)  # type: ignore[arg-type]
    for request in (small, large, *two, small):
        job = job_of(request)
        for step in range(1, job.num_steps + 1):
            stage = job.at(step)
            times.hear_step(stage, 1, SMALL_S if stage.shape[0] == width else LARGE_S)  # type: ignore[index]
        times.changed()
        load.hear(job, done)
    step_s = GangLoad.of_stats(load.routing_stats()).step_s
    expected = [small.num_inference_steps * SMALL_S, large.num_inference_steps * LARGE_S]
    expected += [8 * SMALL_S + 3 * LARGE_S, 30 * SMALL_S + 3 * LARGE_S]
    for request, seconds in zip((small, large, *two), expected, strict=True):
        assert new_work(request).steps_s(step_s) == pytest.approx(seconds)
        (choice,) = rank_gangs({"a": GangLoad(step_s=step_s)}, new_work(request))
        assert choice.own_s == pytest.approx(seconds)
        with load.coming("b", request):
            assert GangLoad.of_stats(load.routing_stats()).jobs["b"].left_s == pytest.approx(seconds)


def test_the_upsampler_may_lie_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its own folder, or its pipeline's."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    for apart in (folder / "latent_upsampler", folder):
        model = {"path": str(PUBLISHED / "LTX-2.3"), "upsampler": str(apart)}
        (card,) = cards_of(PUBLISHED / "LTX-2.3", **model).values()
        assert asked(card, recipe="two-stages").second_stage is not None
        joined = resolve_path(f"{PUBLISHED / 'LTX-2.3'}+upsampler@{apart}")
        assert (joined / "latent_upsampler").resolve() == folder / "latent_upsampler"
    with pytest.raises(ValueError, match="holds no LatentUpsamplerModel"):
        Checkpoint.open(f"{folder}+upsampler@{PUBLISHED / 'LTX-2.3' / 'vae'}", weights=False)
    with pytest.raises(ValueError, match="is a latent upsampler, and wan makes clips in one pass"):
        Checkpoint.open(f"wan-shapes+upsampler@{folder}", weights=False)
    with pytest.raises(ValueError, match="controlnet and upsampler are for different models"):
        cards_of(folder, controlnet="a", upsampler="b")


@pytest.mark.parametrize("inner", ["latent_upsampler/", ""], ids=["in a model", "alone"])
def test_the_hub_sends_the_upsampler_alone(
    inner: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub has the files of Lightricks/LTX-2, or a repository of its own."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path))
    others = ["ltx-2-19b-dev.safetensors", "transformer/diffusion_pytorch_model-00001-of-00008.safetensors"]
    needed = [f"{inner}config.json", f"{inner}diffusion_pytorch_model.safetensors"]
    sent = set[str]()

    def download(_hub_id: str, allow_patterns: list[str]) -> str:
        sent.update(filter_repo_objects(needed + (others if inner else []), allow_patterns=allow_patterns))
        return str(folder if inner else folder / "latent_upsampler")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_path(f"{folder}+upsampler@owner/model")
    assert sent == set(needed)


def test_an_upsampler_without_weights_is_a_problem_before_the_start(folder: Path) -> None:
    """The first request of two passes would fail. The index of the model does not name it."""
    absent = [one for one in weight_problems(Checkpoint.open(str(folder), weights=False)) if "latent_upsampler" in one]
    told = f"{folder / 'latent_upsampler'} has no weights: download the whole model, not only its configuration"
    assert absent == [told]
