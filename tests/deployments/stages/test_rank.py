"""Ranks build from a configuration: whole weights or slices, teams, and warm shapes."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from diffusers import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from deployments.model_config import ModelConfig
from deployments.stages.rank import LoadRankParts, reading_axis, slicing
from deployments.stages.stage_config import DenoiserConfig
from engines.core.engine import RankContext
from engines.core.model import Branch, Mix
from engines.core.weight_memory import WeightMemory
from engines.parallel.collectives import Axis
from engines.parallel.early_start import EarlyStart
from engines.planner.cost_model import USABLE
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource
from pipelines.recipes import Recipe
from pipelines.request import Lora
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.engines.support.rank_resources import separate_rank_resources
from tests.pipelines.lora.support.tiny_lora import write_lora
from tests.pipelines.support.checkpoints import tiny_ltx

CPU = torch.device("cpu")
NAMES = {"ink": 1, "oil": 2, "quick": 3}
"""Adapters, and the seeds of their values."""


@pytest.mark.parametrize(
    ("options", "team_sizes", "is_warm"),
    [
        ({"strategy": "tensor"}, (2,), False),
        ({"strategy": "tensor", "load": "whole", "warm_sizes": ["64x64"]}, (1, 2), True),
        ({"strategy": "ulysses", "warm_sizes": ["64x48", "64x64"], "elastic": True}, (1, 2), True),
        ({"strategy": "ulysses", "reading": "together", "warm_sizes": ["64x64"]}, (1, 2), True),
    ],
)
def test_ranks_of_a_gang(pictures: Path, options: dict[str, Any], team_sizes: tuple[int, ...], is_warm: bool) -> None:
    assert gang(2).run(build, pictures, options) == [(team_sizes, is_warm)] * 2


def build(folder: Path, options: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Return the sizes of the engine's teams, and whether a step of 64x64 is warm."""
    config = DenoiserConfig(num_ranks=2, **options)
    recipes = {"quick": Recipe(attention="fp8")}
    make = LoadRankParts(model=ModelConfig(name="pictures", path=str(folder), denoiser=config, recipes=recipes))
    engine = make(RankContext(rank=dist.get_rank(), num_ranks=2, device="cpu"))().engine
    checkpoint = Checkpoint(folder)
    request = checkpoint.defaults.request(Size(width=64, height=64))
    was_warm = []
    for attention in (None, "fp8"):
        engine.predict(checkpoint.first_step(replace(request, attention=attention)), (0, 1))
        was_warm.append(engine.was_warm)
    engine.close()
    assert len(set(was_warm)) == 1, "a recipe's attention is warm, too"
    return engine.team_sizes, was_warm[0]


def test_the_adapters_of_recipes_have_run_before_the_first_request(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mix runs once, only as recipes have it, and the weights are the loaded ones in the end."""
    files = {name: str(write_lora(pictures, tmp_path / f"{name}.safetensors", seed)) for name, seed in NAMES.items()}
    loras = [LoraSource(path=files["ink"], name="ink"), LoraSource(path=files["oil"], name="oil")]
    model = ModelConfig(
        name="pictures",
        path=str(pictures),
        loras=loras,
        recipes={
            "quick": Recipe(path=files["quick"], scale=0.5, lora=(Lora(name="ink", scale=0.8),)),
            "plain": Recipe(num_inference_steps=4),
        },
        denoiser=DenoiserConfig(num_ranks=1, warm_sizes=(Size(width=64, height=64),)),
    )
    mixes: list[Mix] = []
    predict = TorchEngine.predict

    def spy(self: TorchEngine, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        mixes.extend(dict.fromkeys(branch.additions for branch in branches))
        return predict(self, branches, ranks)

    monkeypatch.setattr(TorchEngine, "predict", spy)
    with separate_rank_resources():
        engine = LoadRankParts(model=model)(RankContext(rank=0, num_ranks=1, device="cpu"))().engine
        assert [mix for mix in mixes if mix] == [(("ink", 0.8), ("quick", 0.5))]
        assert mixes[-1] == ()
        engine.close()


def test_a_latent_upsampler_is_there_from_the_start_and_sleeps(tmp_path: Path) -> None:
    """Any request may want two passes, even without such a recipe."""
    held: list[Any] = []
    source = str(tiny_ltx.ltx2_two_stages(tmp_path))
    model = ModelConfig(name="clips", path=source, denoiser=DenoiserConfig(num_ranks=1, strategy="ulysses"))
    with separate_rank_resources(), patch.object(WeightMemory, "hold", lambda _self, module: held.append(module)):
        LoadRankParts(model=model)(RankContext(rank=0, num_ranks=1, device="cpu"))
    assert [type(module) for module in held] == [LTX2VideoTransformer3DModel, LTX2LatentUpsamplerModel]


def test_auto_is_decided_once_by_steps_of_the_models_default_size(pictures: Path, tmp_path: Path) -> None:
    """The next gang reads the first one's file and times nothing."""
    (first, again), other = gang(2).run(build_twice, pictures, tmp_path)
    assert (first, again) == other
    strategy, file = first
    assert again == (strategy, "nothing is timed")
    kept = json.loads((tmp_path / "strategies" / file).read_text())
    assert kept["strategies"]["2"][0] == strategy
    assert kept["times_ms"]


def build_twice(folder: Path, data_dir: Path) -> tuple[tuple[str, str], tuple[str, str]]:
    config = DenoiserConfig(num_ranks=2, strategy="auto")
    make = LoadRankParts(model=ModelConfig(name="pictures", path=str(folder), denoiser=config))
    context = RankContext(rank=dist.get_rank(), num_ranks=2, device="cpu")

    def strategy() -> str:
        parts = make(context)()
        engine: Any = parts.engine
        engine.close()
        assert parts.estimates is not None
        assert sorted(parts.estimates.by_size) == [1, 2], "smaller teams have estimates, too"
        return str(engine.division.team((0, 1)).spec.name)

    every_way = patch("engines.planner.forecast.TRIAL_MARGIN", 1000.0)  # times all, on fast machines too
    with patch.dict(os.environ, {"TROUPE_DATA_DIR": str(data_dir)}), every_way:
        first = strategy()
        (file,) = (data_dir / "strategies").iterdir()
        with patch("engines.torch_engine.autotune.forecasts", side_effect=AssertionError("it is decided anew")):
            return (first, file.name), (strategy(), "nothing is timed")


def test_weights_wait_for_the_first_exchanges(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each would wait for the other, on different ranks."""
    config = DenoiserConfig(num_ranks=1)
    make = LoadRankParts(model=ModelConfig(name="pictures", path=str(pictures), denoiser=config))
    with separate_rank_resources() as resources:
        exchanges: Future[None] = Future()
        resources.get(EarlyStart).exchanges = exchanges
        exchanges.set_exception(RuntimeError("an exchange failed"))
        monkeypatch.setattr(Checkpoint, "denoiser", Mock(side_effect=AssertionError("weights are read")))
        with pytest.raises(RuntimeError, match="an exchange failed"):
            make(RankContext(rank=0, num_ranks=1, device="cpu"))


def test_weights_do_not_wait_for_the_first_kernels_but_the_engine_does(
    pictures: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, context = DenoiserConfig(num_ranks=1), RankContext(rank=0, num_ranks=1, device="cpu")
    make = LoadRankParts(model=ModelConfig(name="pictures", path=str(pictures), denoiser=config))
    with separate_rank_resources() as resources:
        start = resources.get(EarlyStart)
        start.exchanges, start.future = Future(), Future()
        start.exchanges.set_result(None)
        start.future.set_exception(RuntimeError("a kernel failed"))
        build_parts = make(context)
        assert "rank: weights" in phases(capfd), "they are read"
        start.seconds["first kernels"] = 1.5
        with pytest.raises(RuntimeError, match="a kernel failed"):
            build_parts()
        start.future = Future()
        start.future.set_result(None)
        build_parts().engine.close()
    assert phases(capfd)["rank: early, first kernels"] == 1.5


def phases(capfd: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return the seconds of the phases logged since the last call."""
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    return {line["phase"]: line["took_s"] for line in lines if "phase" in line}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strategy": "ulysses"}, False),
        ({"strategy": "ulysses2xtensor2"}, True),
        ({"strategy": "pipeline"}, True),
        ({"strategy": "pipeline", "load": "whole"}, False),
        ({"strategy": "auto"}, False),
        ({"strategy": "auto", "load": "sliced"}, True),
        ({"strategy": "tensor", "engine": "tensorrt", "gpus_per_rank": 1}, False),
    ],
)
def test_weights_are_read_in_slices_where_the_strategy_divides_them(
    pictures: Path, options: dict[str, Any], expected: bool
) -> None:
    config = DenoiserConfig(num_ranks=4, **options)
    assert slicing(config, Checkpoint(pictures))() is expected


def test_auto_slices_what_does_not_fit(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.planner.measure.memory_bytes", lambda device: 1000)
    assert slicing(DenoiserConfig(num_ranks=4), Checkpoint(pictures))()


@pytest.mark.parametrize(("rooms", "expected"), [((1000, 2**40), True), ((2**40, 1000), True), ((2**40, 2**41), False)])
def test_ranks_of_unlike_gpus_load_alike(pictures: Path, rooms: tuple[int, int], expected: bool) -> None:
    """Ranks that read together would wait for ever for one that reads slices."""
    assert gang(2).run(slices_with, pictures, rooms) == [expected] * 2


def slices_with(folder: Path, rooms: tuple[int, int]) -> bool:
    room = rooms[dist.get_rank()]
    with patch("engines.planner.measure.memory_bytes", return_value=room):
        return slicing(DenoiserConfig(num_ranks=2, reading="together"), Checkpoint(folder))()


def test_weights_that_change_from_job_to_job_need_room_twice(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 1.5 * Checkpoint(pictures).weights_bytes() / USABLE
    monkeypatch.setattr("engines.planner.measure.memory_bytes", lambda device: room)
    for name, expected in (("", False), ("ink", True)):
        checkpoint = Checkpoint(pictures, loras=[LoraSource(path="ink.safetensors", name=name)])
        assert slicing(DenoiserConfig(num_ranks=4), checkpoint)() is expected
    on_host = DenoiserConfig(num_ranks=4, torch=TorchOptions(originals_on_host=True))
    assert not slicing(on_host, checkpoint)(), "loaded values are in host memory"


def test_quantised_weights_need_less_room(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 0.8 * Checkpoint(pictures).weights_bytes() / USABLE
    monkeypatch.setattr("engines.planner.measure.memory_bytes", lambda device: room)
    for precision, expected in (("native", True), ("fp8", False), ("int8", False)):
        config = DenoiserConfig(num_ranks=4, precision=precision)
        assert slicing(config, Checkpoint(pictures))() is expected


def test_the_checkpoint_is_opened_beside_the_first_exchanges(pictures: Path) -> None:
    """Only weights, and the exchange that decides how they are read, wait."""
    calls, config = Mock(), DenoiserConfig(num_ranks=4)
    make = LoadRankParts(model=ModelConfig(name="pictures", path=str(pictures), denoiser=config))
    calls.smallest_memory_bytes.return_value = 2**40
    with (
        separate_rank_resources(),
        patch("engines.parallel.early_start.wait_for_first_exchanges", calls.wait),
        patch("engines.planner.measure.smallest_memory_bytes", calls.smallest_memory_bytes),
        patch.object(Checkpoint, "weights_bytes", calls.weights_bytes),
        patch.object(Checkpoint, "denoiser", calls.denoiser),
    ):
        calls.weights_bytes.return_value = 1000
        calls.denoiser.return_value.modules = {}
        make(RankContext(rank=0, num_ranks=4, device="cpu"))
    names = [name for name, *_ in calls.mock_calls]
    assert names == ["weights_bytes", "wait", "smallest_memory_bytes", "denoiser"]


@pytest.mark.parametrize(
    ("reading", "device", "num_ranks", "num_hosts", "expected"),
    [
        ("auto", "cuda:0", 2, 1, True),
        ("auto", "cpu", 2, 1, False),
        ("together", "cpu", 2, 1, True),
        ("each", "cuda:0", 2, 1, False),
        ("auto", "cuda:0", 1, 1, False),
        ("auto", "cuda:0", 2, 2, False),
        ("auto", "cuda:0", 4, 2, True),
    ],
)
def test_ranks_of_a_host_read_together_on_gpus(
    reading: Any, device: str, num_ranks: int, num_hosts: int, expected: bool
) -> None:
    of_host = Axis(ranks=(0, 1), index=0, group="host")
    context = RankContext(rank=0, num_ranks=num_ranks, device=device, num_hosts=num_hosts)
    config = DenoiserConfig(num_ranks=num_ranks, num_nodes=num_hosts, reading=reading)
    with patch("engines.parallel.early_start.host_axis", return_value=of_host):
        axis = reading_axis(config, context)
    assert axis == (of_host if expected else Axis(ranks=(0,), index=0))


@pytest.mark.parametrize(
    "fields", [{"num_ranks": 1}, {"num_ranks": 2, "num_nodes": 2}, {"num_ranks": 2, "load": "sliced"}]
)
def test_reading_together_needs_several_ranks_and_whole_weights(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="reading: together is for whole weights and several ranks on a node"):
        DenoiserConfig(reading="together", **fields)


def test_slices_need_ranks_to_share_them(pictures: Path) -> None:
    config = DenoiserConfig(num_ranks=1, load="sliced")
    with pytest.raises(ValueError, match="load: sliced needs the engine torch and several ranks, not torch on 1"):
        slicing(config, Checkpoint(pictures))()
