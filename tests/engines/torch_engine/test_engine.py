"""One engine on a gang of four runs any team, several teams at a time, and any mix of branches; its options work."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import JobFailedError
from engines.core.model import Branch
from engines.core.tensors import relative_difference
from engines.fast.interface import SideStream
from engines.parallel.self_check import WrongAnswerError
from engines.quantization.calibration import recording, save_calibration
from engines.torch_engine.checks import check_fast_path
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import ExchangeRules
from engines.torch_engine.options import TorchOptions
from pipelines.models.mmdit import FastMMDiT
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.torch_engine.support.decisions import EVERYONE

Teams = tuple[tuple[int, ...], ...]


@pytest.mark.parametrize("strategy", ["hybrid", "guidance", "auto"])
def test_teams_of_any_width_side_by_side(strategy: str) -> None:
    """Teams of all widths run side by side without a reload; every rank gives its job's answer."""
    plans: tuple[Teams, ...] = (
        ((0, 1), (2,), (3,)),
        ((0, 1, 2, 3),),
        ((0,), (1,), (2, 3)),
        ((0, 1), (2, 3)),
        ((0,), (1,), (2,), (3,)),
    )
    by_rank = gang(4).run(run_plans, strategy, plans)
    for number, plan in enumerate(plans):
        for job, ranks in enumerate(plan):
            for rank in ranks:
                errors = map(relative_difference, by_rank[rank][number], alone(job_branches(job)))
                assert max(errors) <= 1e-5, (plan, rank)


def job_branches(job: int) -> tuple[Branch, ...]:
    """Return the branches of a job; jobs differ in seed, length and number of branches."""
    length = ("even", "uneven")[job % 2]
    return models.branches("flux", length, num=1 + job % 2, seed=50 + job)


def alone(branches: tuple[Branch, ...]) -> tuple[Tensor, ...]:
    return TorchEngine(models.model("flux")).predict(branches, (0,))


def fail_and_go_on() -> tuple[str, str, Tensor]:
    """Return the errors of too wide inputs and of a failing last layer, and a right prediction after both."""
    model, ranks = models.model("flux"), (0, 1)
    (right,) = models.branches("flux", "even")
    engine = TorchEngine(model, strategy="ulysses", fast=False)
    wide = torch.zeros(*right.inputs["hidden_states"].shape[:2], 17)
    told = []
    with pytest.raises(JobFailedError, match="17") as before:
        engine.predict((replace(right, inputs={**right.inputs, "hidden_states": wide}),), ranks)
    told.append(str(before.value))
    broken = patch.object(model.modules["transformer"].norm_out, "forward", side_effect=RuntimeError("no more"))
    with broken, pytest.raises(RuntimeError) as after:
        engine.predict((right,), ranks)
    told.append(type(after.value).__name__)
    (prediction,) = engine.predict((right,), ranks)
    return told[0], told[1], prediction


def test_a_forward_that_fails_before_any_exchange_fails_its_job_alone() -> None:
    """All ranks raise the same error and go on; a later failure is no job's failure."""
    (expected,) = alone(models.branches("flux", "even"))
    (first, *_), *others = results = gang(2).run(fail_and_go_on)
    assert "mat1 and mat2 shapes cannot be multiplied" in first
    assert all(told == first for told, *_ in others)
    for _, later, prediction in results:
        assert later == "RuntimeError"
        assert relative_difference(prediction, expected) <= 1e-5


@pytest.mark.parametrize("strategy", ["ulysses", "ring", "guidance", "ulysses2xtensor2"])
def test_the_fast_path_gives_the_same_answers(strategy: str) -> None:
    """It holds on a team of four and alone; with split weights there is no fast path, and the module runs."""
    for ranks in ((0, 1, 2, 3), None):
        for answer in gang(4).run(predict_fast, strategy, ranks):
            assert max(map(relative_difference, answer, alone(mixed()))) <= 1e-5


def test_the_fast_path_is_checked_against_the_module() -> None:
    model = models.model.__wrapped__("flux")
    engine = TorchEngine(model, fast=True)
    assert max(check_fast_path(engine, model, rank=0).values()) < 1e-5
    gelu = "engines.fast.gemm.NativeGemm.activated"
    with patch(gelu, lambda product, x: product(x).relu()), pytest.raises(WrongAnswerError, match="fast path"):
        check_fast_path(engine, model, rank=0)
    assert check_fast_path(TorchEngine(model), model, rank=0) == {}


def predict_fast(strategy: str, ranks: tuple[int, ...] | None) -> tuple[Tensor, ...]:
    engine = TorchEngine(models.model("flux"), strategy=strategy, fast=True)
    with patch("pipelines.models.mmdit.FastMMDiT.step", autospec=True, side_effect=FastMMDiT.step) as step:
        predicted = engine.predict(mixed(), ranks or (dist.get_rank(),))
    assert bool(step.call_count) == (ranks is None or "tensor" not in strategy)
    engine.close()
    return predicted


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("fast", [True, False])
def test_quantised_linears_stay_close(fast: bool, precision: str) -> None:
    model = models.model.__wrapped__("flux")  # its layers are swapped for good
    branches = models.branches("flux", "even")
    engine = TorchEngine(model, fast=fast, precision=precision)
    errors = list(map(relative_difference, engine.predict(branches, (0,)), alone(branches)))
    assert 1e-4 < max(errors) < 0.1


def test_fp8_with_fixed_scales(tmp_path: Path) -> None:
    model = models.model.__wrapped__("flux")
    branches = models.branches("flux", "even")
    with recording(model.modules["transformer"], model.plan) as amax:
        expected = TorchEngine(model).predict(branches, (0,))
    save_calibration({"transformer": amax}, tmp_path / "scales.json")
    options = TorchOptions(calibration=tmp_path / "scales.json")
    engine = TorchEngine(model, precision="fp8-static", options=options)
    assert 1e-4 < relative_difference(engine.predict(branches, (0,))[0], expected[0]) < 0.1


def run_plans(strategy: str, plans: tuple[Teams, ...]) -> list[tuple[Tensor, ...]]:
    engine = TorchEngine(models.model("flux"), strategy=strategy)
    mine = []
    for plan in plans:
        job, ranks = next((job, ranks) for job, ranks in enumerate(plan) if dist.get_rank() in ranks)
        mine.append(engine.predict(job_branches(job), ranks))
    engine.close()
    return mine


def test_several_jobs_in_one_prediction() -> None:
    """Only some branches of different jobs can be paired: shapes 1 1 | 2 | 1 1."""
    for answer in gang(4).run(predict_mixed):
        errors = list(map(relative_difference, answer, alone(mixed())))
        assert len(errors) == 5
        assert max(errors) <= 1e-5


def mixed() -> tuple[Branch, ...]:
    even, uneven = models.branches("flux", "even", num=2), models.branches("flux", "uneven", num=1)
    return (*even, *uneven, *even)


def predict_mixed() -> tuple[Tensor, ...]:
    engine = TorchEngine(models.model("flux"), strategy="guidance")
    return engine.predict(mixed(), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((1, 2), r"rank \d is in no team \(1, 2\) for ulysses2; its teams are: .*\(0, 1, 2, 3\) ulysses4"),
        ((0, 1, 2), "cannot divide a step over 3 ranks; allowed: 1, 2, 4"),
    ],
)
def test_a_team_that_was_not_formed(ranks: tuple[int, ...], message: str) -> None:
    for text in gang(4).run(error_of, ranks):
        assert re.search(message, text)


def error_of(ranks: tuple[int, ...]) -> str:
    engine = TorchEngine(models.model("flux"), strategy="ulysses")
    try:
        engine.predict(models.branches("flux", "even"), ranks)
    except ValueError as error:
        return str(error)
    return "no error"


def test_fewer_heads_than_ranks_stop_the_gang_at_start() -> None:
    for text in gang(4).run(load_with_two_heads):
        assert "ulysses 4 does not fit: 2 heads, and every rank needs one; allowed: 1 to 2" in text


def load_with_two_heads() -> str:
    model = replace(models.model("flux"), num_heads=2)
    try:
        TorchEngine(model, strategy="ulysses")
    except ValueError as error:
        return str(error)
    return "no error"


def test_wan_with_two_transformers_and_a_time_per_token() -> None:
    """Each branch names its transformer; timesteps are cut with the tokens."""
    for answer in gang(2).run(predict_two_transformers):
        expected = predict_two_transformers(alone=True)
        assert max(map(relative_difference, answer, expected)) <= 1e-5
        assert relative_difference(answer[0], answer[1]) > 0.1


def predict_two_transformers(alone: bool = False) -> tuple[Tensor, ...]:
    from tests.support.wan_denoiser import as_denoiser

    parts = {"transformer": models.transformer("wan"), "transformer_2": models.shake(models.transformer("wan"), seed=9)}
    model = as_denoiser(parts, expand_timesteps=True)
    (branch,) = models.branches("wan", "uneven")
    grid = torch.linspace(100.0, 900.0, 45).expand(2, -1).contiguous()
    inputs = {**branch.inputs, "timestep": grid}
    branches = tuple(Branch(inputs=inputs, module=name) for name in parts)
    return TorchEngine(model).predict(branches, (0,) if alone else (0, 1))


def test_unknown_module() -> None:
    (branch,) = models.branches("flux", "even")
    with pytest.raises(ValueError, match="no module 'transformer_3'; it has transformer"):
        TorchEngine(models.model("flux")).predict((Branch(inputs=branch.inputs, module="transformer_3"),), (0,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "diagonal"}, "unknown strategy 'diagonal'"),
        ({"precision": "fp3"}, "precision is 'fp3'"),
        ({"precision": "fp8-static"}, "int8-static need a file that `troupe calibrate` wrote"),
        ({"options": TorchOptions(calibration=Path("scales.json"))}, "nothing else takes one"),
    ],
)
def test_what_is_asked_is_checked_before_anything_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchEngine(models.model("flux"), **options)


def test_closing_gives_the_model_back() -> None:
    model = models.model("flux")
    (branch,) = models.branches("flux", "even")
    engine = TorchEngine(model)
    engine.predict((branch,), (0,))
    hooks = [len(module._forward_hooks) for module in model.modules["transformer"].modules()]
    engine.close()
    after = [len(module._forward_hooks) for module in model.modules["transformer"].modules()]
    assert sum(after) == sum(hooks) - 1


def streams_of(rules: ExchangeRules) -> dict[int, list[tuple[str, bool]]]:
    """Return the side streams of steps over two ranks and over one, and whether they are in use."""
    used: list[tuple[str, bool]] = []

    def recorded(device: torch.device, name: str, *, in_use: bool = True) -> SideStream:
        used.append((name, in_use))
        return SideStream(device, name, in_use=in_use)

    by_size = {}
    with (
        patch("engines.torch_engine.fast_step.SideStream", recorded),
        closing(TorchEngine(models.model("flux"), strategy="ulysses", fast=True)) as engine,
    ):
        engine.use(rules)
        for ranks in (EVERYONE, (dist.get_rank(),)):
            engine.predict(models.branches("flux", "even"), ranks)
            by_size[len(ranks)], used[:] = list(used), []
    return by_size


def test_side_streams_are_of_teams_alone() -> None:
    """A single rank keeps its streams."""
    alone = [("stream", True), ("mlp", False)]
    for in_use in (True, False):
        expected = {2: [("stream", in_use), ("mlp", in_use)], 1: alone}
        assert gang(2).run(streams_of, ExchangeRules(side_streams=in_use)) == [expected] * 2
