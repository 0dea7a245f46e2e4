"""Ranks read only their share of the weights: how much they hold, their answers, and refusals."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.core.engine import RankContext
from engines.core.tensors import relative_difference
from engines.parallel.self_check import WrongAnswerError
from engines.parallel.weight_files import INDEX, NAME, Slice
from engines.registry import load_engine
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.run import PlainEngine
from tests.engines.support.gloo import gang
from tests.pipelines.support.checkpoints import tiny, tiny_cosmos, tiny_ltx, tiny_models, tiny_qwen

CPU = torch.device("cpu")
ALL = (0, 1, 2, 3)
STRATEGIES = ["tensor", "tensor2xulysses2", "pipeline2xtensor2", "guidance2xtensor2", "pipeline2xring2"]


MAKERS: dict[str, Callable[[Path], Path]] = {"flux": tiny.flux, "wan": tiny.wan}


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a diffusers directory whose transformer is in many files."""
    return in_many_files(MAKERS[request.param](tmp_path_factory.mktemp(request.param)))


def in_many_files(path: Path) -> Path:
    part = path / "transformer"
    module = Checkpoint(path).denoiser().modules["transformer"]
    (part / NAME).unlink()
    module._modules.pop("controlnet", None)  # it has files of its own
    module.save_pretrained(part, max_shard_size="60KB")  # type: ignore[operator]
    assert len(set(json.loads((part / INDEX).read_text())["weight_map"].values())) > 3
    return path


def in_turn(strategies: Sequence[str]) -> list[Any]:
    """Return each strategy with each model; quick runs have one model each, in turn."""
    turns = itertools.product(enumerate(strategies), enumerate(MAKERS))
    return [
        pytest.param(name, strategy, marks=[pytest.mark.slow] if (number + place) % 2 else [])
        for (number, strategy), (place, name) in turns
    ]


@pytest.mark.parametrize(("folder", "strategy"), in_turn(STRATEGIES), indirect=["folder"])
def test_the_answer_is_that_of_the_whole_model_and_a_rank_holds_and_reads_its_share(
    folder: Path, strategy: str
) -> None:
    model = Checkpoint(folder).denoiser()
    expected = PlainEngine(model=model).predict(model.probe())
    whole_bytes = sum(weight.nbytes for weight in model.modules["transformer"].parameters())
    assert Checkpoint(folder).weights_bytes() == whole_bytes
    for answer, held_bytes, read_bytes in gang(4).run(predict_sliced, folder, strategy):
        assert max(map(relative_difference, answer, expected)) <= 1e-5
        assert held_bytes == read_bytes, "nothing was read that is not held"
        assert held_bytes < SHARE[strategy] * whole_bytes


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (tiny_models.flux2_klein, 0.75),
        (tiny_models.z_image, 0.9),
        (tiny_cosmos.cosmos, 0.75),
        (tiny_ltx.ltx, 0.9),
        (tiny_qwen.qwen_controlled, 0.75),
    ],
)
def test_segments_key_heads_and_tables_too(make: Callable[[Path], Path], share: float, tmp_path: Path) -> None:
    folder = in_many_files(make(tmp_path))
    model = Checkpoint(folder).denoiser()
    expected = PlainEngine(model=model).predict(model.probe())
    for answer, held_bytes, read_bytes in gang(4).run(predict_sliced, folder, "tensor2xulysses2"):
        assert max(map(relative_difference, answer, expected)) <= 1e-5
        assert held_bytes == read_bytes < share * Checkpoint(folder).weights_bytes()


SHARE = {
    "tensor": 0.55,
    "tensor2xulysses2": 0.7,
    "pipeline2xtensor2": 0.55,
    "guidance2xtensor2": 0.7,
    "pipeline2xring2": 0.75,
}
"""Shares of small models, whose embedders and modulation are a large part."""


def predict_sliced(folder: Path, strategy: str) -> tuple[tuple[Tensor, ...], int, int]:
    """Return the prediction, and the bytes of weights held and read for it."""
    model = Checkpoint(folder).denoiser(sliced=True)
    with closing_engine(model, strategy) as engine, counting_reads() as read:
        answer = engine.predict(model.probe(), ALL)
        shares = [share.module for share in engine._sharded._shares.values()]
        assert len(shares) == 1, "one branch and two need the same weights"
        return answer, held_bytes(shares[0]), sum(read)


@contextmanager
def closing_engine(model: Any, strategy: str) -> Iterator[TorchEngine]:
    engine = TorchEngine(model, strategy=strategy)
    try:
        assert engine.team_sizes == (4,)
        yield engine
    finally:
        engine.close()


@contextmanager
def counting_reads() -> Iterator[list[int]]:
    read: list[int] = []
    original = Slice.read

    def counted(self: Slice, file: Any) -> Tensor:
        value = original(self, file)
        read.append(value.nbytes)
        return value

    with patch.object(Slice, "read", counted):
        yield read


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of memory behind the parameters, beyond their views."""
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters() if not p.is_meta
    }
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_and_buffers_are_those_of_the_loaded_model_to_the_bit(folder: Path, dtype: torch.dtype) -> None:
    """All of them are read, including parts that a family keeps in float32."""
    loaded = Checkpoint(folder, dtype=dtype).denoiser().modules["transformer"]
    model = Checkpoint(folder, dtype=dtype).denoiser(sliced=True)
    module = TorchEngine(model)._sharded.module("transformer", TorchEngine(model).division.team((0,)))
    for own, other in (
        (module.named_parameters, loaded.named_parameters),
        (module.named_buffers, loaded.named_buffers),
    ):
        read, expected = dict(own()), dict(other())
        assert read.keys() == expected.keys()
        for name, value in read.items():
            assert value.dtype == expected[name].dtype, name
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(("folder", "strategy"), in_turn(["tensor", "pipeline2xtensor2", "auto"]), indirect=["folder"])
def test_a_gang_checks_itself_at_start(folder: Path, strategy: str) -> None:
    assert gang(4).run(load_checked, folder, strategy, False) == ["checked"] * 4


def test_a_silent_exchange_stops_the_gang(folder: Path) -> None:
    for told in gang(4).run(load_checked, folder, "tensor", True):
        assert "ranks (0, 1, 2, 3) with strategy tensor4 differ from one rank alone" in told


def load_checked(folder: Path, strategy: str, broken: bool) -> str:
    model = Checkpoint(folder).denoiser(sliced=True)
    context = RankContext(rank=dist.get_rank(), num_ranks=4, device="cpu")
    silent = patch("engines.parallel.tensor.all_reduce_sum", lambda x, axis: x) if broken else nullcontext()
    try:
        with silent:
            load_engine("torch", model, context, strategy=strategy).close()
    except WrongAnswerError as error:
        return str(error)
    return "checked"


def test_files_that_lack_a_tensor_or_are_not_there(folder: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    index = json.loads((broken / "transformer" / INDEX).read_text())
    places = index["weight_map"]
    absent = [name for name, file in places.items() if file == places["proj_out.weight"]]
    index["weight_map"] = {name: file for name, file in places.items() if name not in absent}
    (broken / "transformer" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"lists no tensor ({'|'.join(map(re.escape, absent))})"):
        predict_alone(broken)
    (broken / "transformer" / INDEX).unlink()
    with pytest.raises(ValueError, match=r"has neither diffusion_pytorch_model\.safetensors nor"):
        predict_alone(broken)


def predict_alone(folder: Path) -> None:
    model = Checkpoint(folder).denoiser(sliced=True)
    TorchEngine(model).predict(model.probe(), (0,))


def test_weights_are_read_before_the_first_request(folder: Path) -> None:
    """A missing or slow file stops or delays the start, and no job."""
    assert gang(4).run(reads_after_start, folder) == [0] * 4


def reads_after_start(folder: Path) -> int:
    model = Checkpoint(folder).denoiser(sliced=True)
    context = RankContext(rank=dist.get_rank(), num_ranks=4, device="cpu")
    engine = load_engine("torch", model, context, strategy="tensor")
    with counting_reads() as read:
        engine.predict(model.probe(), ALL)
    engine.close()
    return len(read)
