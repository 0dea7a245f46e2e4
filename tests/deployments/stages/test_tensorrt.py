"""A line of configuration gives TensorRT engines on the ranks; what TensorRT cannot do is refused on reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import pipelines
from deployments.config import AppConfig
from deployments.model_config import ModelConfig
from deployments.stages import denoiser
from deployments.stages.denoiser import node_environment
from deployments.stages.rank import LoadRankParts
from engines.core.engine import RankContext
from engines.core.model import Branch, ModelInputs
from engines.parallel.mesh import Team
from engines.tensorrt_engine import engine as engine_module
from engines.tensorrt_engine import load
from engines.tensorrt_engine.build.bindings import Target
from engines.tensorrt_engine.build.builder import BuildOptions
from engines.tensorrt_engine.build.caches import EngineCache, cached_engine
from engines.tensorrt_engine.config import TensorRTConfig
from engines.tensorrt_engine.export.graph import EngineGraph
from engines.tensorrt_engine.rules import TensorRTOptions
from engines.tensorrt_engine.run import nccl
from engines.tensorrt_engine.run.runtime import PreflightError
from pipelines.checkpoint import Checkpoint
from pipelines.run import PlainEngine
from pipelines.size import Size
from tests.engines.tensorrt_engine.conftest import translations
from tests.engines.tensorrt_engine.support.gloo_runner import GlooRunner

__all__ = ["translations"]

PUBLISHED = Path(pipelines.__file__).parent / "published"
CPU, SM89 = torch.device("cpu"), Target.parse("sm89")
HERE = RankContext(rank=0, num_ranks=1, device="cpu")


def model_config(**denoiser: Any) -> ModelConfig:
    settings = {"engine": "tensorrt", "gpus_per_rank": 1, "num_ranks": 4} | denoiser
    return ModelConfig.model_validate({"name": "flux-shapes", "dtype": "bfloat16", "denoiser": settings})


@pytest.mark.parametrize(
    ("denoiser", "message"),
    [
        ({"strategy": "tensor2xulysses2"}, "ignores the groups.*Use tensor4 or ulysses4 alone, or engine: torch"),
        ({"strategy": "tensor2xring2"}, "ignores the groups"),
        (
            {"strategy": "pipeline"},
            "load one engine file. Use ulysses4 or tensor4, or engine: torch",
        ),
        ({"strategy": "tensor", "tensorrt": {"weights": "constants"}}, "one engine file per rank; use weights: inputs"),
        ({"strategy": "tensor", "precision": "int8-static"}, "scales belong to whole weights; use ulysses"),
        ({"strategy": "guidance2xulysses", "num_ranks": 3}, "needs a multiple of 2 ranks, not 3"),
        ({"strategy": "magic"}, "unknown strategy 'magic'; known: ulysses"),
        ({"precision": "fp4"}, "the TensorRT engine knows auto, native, fp8-static, int8-static"),
        ({"precision": "fp16"}, "native computes in the model's dtype, so set that to float16"),
        ({"attention": "fp8"}, "TensorRT computes attention in the model's dtype: leave attention out, or use engine"),
        ({"gpus_per_rank": 0}, "give each rank one, or use engine: torch"),
        ({"tensorrt": {"weights": "elsewhere"}}, "weights"),
        ({"tensorrt": {"plans": "here"}}, "plans"),
    ],
)
def test_refused_when_read_with_reason_and_alternative(denoiser: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model_config(**denoiser)


def test_its_requests_name_no_attention() -> None:
    one = {"name": "m", "recipes": {"quick": {"attention": "fp8"}}}
    with pytest.raises(ValidationError, match="TensorRT computes attention in the model's dtype"):
        AppConfig.model_validate({"models": [{**one, "denoiser": {"gpus_per_rank": 1, "engine": "tensorrt"}}]})


def test_the_rules_are_those_of_this_engine_alone_and_so_is_its_section() -> None:
    model_config(engine="torch", strategy="tensor2xulysses2")
    with pytest.raises(ValidationError, match="the section tensorrt is for engine: tensorrt alone"):
        model_config(engine="torch", strategy="tensor2xulysses2", tensorrt={"weights": "constants"})


def test_one_line_is_enough() -> None:
    document = {"models": [{"name": "flux-shapes", "denoiser": {"gpus_per_rank": 1, "engine": "tensorrt"}}]}
    assert AppConfig.model_validate(document).models[0].denoiser.engine == "tensorrt"


class RecordingEngine:
    """An engine of one rank that records its warm-ups: tokens, and ranks."""

    team_sizes = (1,)
    estimates = None

    def __init__(self) -> None:
        self.warmed: list[tuple[int, tuple[int, ...]]] = []

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        self.warmed.append((branches[0].inputs["hidden_states"].shape[1], ranks))


def test_options_reach_the_engine_and_nccl_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def fake_engine(_model: object, _context: RankContext, **options: Any) -> RecordingEngine:
        given.update(options)
        return engine

    engine = RecordingEngine()
    monkeypatch.setattr(load, "load_tensorrt_engine", fake_engine)
    tensorrt = {"weights": "constants", "cache_dir": str(tmp_path)}
    sizes = ["128x128", "64x128"]
    model = model_config(strategy="allgather_kv", precision="int8-static", tensorrt=tensorrt, warm_sizes=sizes)
    loaded: object = LoadRankParts(model=model)(HERE)().engine
    assert loaded is engine
    assert engine.warmed == [(64, (0,)), (32, (0,))], "image tokens of the warm sizes, on this rank's team of one"
    assert (given["strategy"], given["precision"]) == ("allgather_kv", "int8-static")
    assert given["options"] == TensorRTOptions(weights="constants", cache_dir=tmp_path)
    assert [branches[0].inputs["hidden_states"].shape[1] for branches in given["expected"]] == [64, 32]
    monkeypatch.setattr(nccl, "rank_environment", lambda environment: {"LIBRARIES": environment["LD_LIBRARY_PATH"]})
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/this/node")  # read when needed, not when configured
    monkeypatch.setattr(denoiser, "is_on_loopback", lambda: False)
    assert node_environment("tensorrt") == {"LIBRARIES": "/of/this/node"}
    assert node_environment("torch") == {}


def test_on_one_machine_nccl_stays_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoiser, "is_on_loopback", lambda: True)
    assert node_environment("torch") == {"NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert node_environment("torch") == {}, "ranks inherit what the machine says"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_a_rank_without_a_gpu_says_so() -> None:
    with pytest.raises(PreflightError, match=r"rank 0: a TensorRT engine runs on a GPU: found none.*engine: torch"):
        LoadRankParts(model=model_config(num_ranks=1))(HERE)()


def test_a_rank_refuses_a_model_without_reading_weights() -> None:
    """The folder has none, which would be another error."""
    model = model_config(num_ranks=1).model_copy(update={"path": str(PUBLISHED / "Z-Image")})
    with pytest.raises(
        ValueError, match=r"ZImageTransformer2DModel .*, which no TensorRT engine does: .*engine: torch"
    ):
        LoadRankParts(model=model)(HERE)


class Uncaptured:
    """Stands for a CUDA graph."""

    def __init__(self, step: Callable[[ModelInputs], Tensor], inputs: ModelInputs, pool: object) -> None:
        self._step = step

    def __call__(self, inputs: ModelInputs) -> Tensor:
        return self._step(inputs)

    def close(self) -> None:
        """Do nothing."""


def test_from_the_configuration_to_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the device is simulated: engines are built and stored for SM 8.9, and onnxruntime runs their graphs."""
    built = []

    def runners(config: TensorRTConfig, model: Any, context: Any, target: Target) -> Any:
        def make(graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> GlooRunner:
            options, cache = BuildOptions(target=target), EngineCache(config.cache_dir)
            built.append(cached_engine(graph, options, cache, strategy="single", precision="fp32"))
            return GlooRunner(graph, weights, team)

        return make

    monkeypatch.setattr(load, "current_target", lambda rank: SM89)
    monkeypatch.setattr(load, "engine_runners", runners)
    monkeypatch.setattr(engine_module, "CapturedStep", Uncaptured)
    monkeypatch.setattr(engine_module, "GraphPool", lambda device: None)
    wanted = {"tensorrt": {"cache_dir": str(tmp_path)}, "warm_sizes": ["128x128", "64x128"]}
    config = model_config(num_ranks=1, **wanted).model_copy(update={"dtype": "float32"})
    parts = LoadRankParts(model=config)(HERE)()
    assert len({engine.sha256 for engine in built}) == 1, "both sizes, and the check, share an engine file"
    checkpoint = Checkpoint.open("flux-shapes")
    plain = PlainEngine(model=checkpoint.denoiser())
    request = checkpoint.defaults.request(Size(width=96, height=128), prompt="a large red circle", seed=5)
    state = parts.sampler.begin(request, checkpoint.text_encoder().encode(request))
    given, expected = (
        parts.engine.predict(parts.sampler.branches(state), (0,)),
        plain.predict(parts.sampler.branches(state)),
    )
    torch.testing.assert_close(given[0], expected[0], rtol=1e-3, atol=1e-3)
    assert len(built) == 3, "a size between them has a context of its own"
    assert len({engine.sha256 for engine in built}) == 1, "it has no file of its own"
    parts.engine.close()
