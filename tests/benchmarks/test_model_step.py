"""Facts and times of a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks import kernel_times
from benchmarks.model_step import (
    Arguments,
    attempt,
    diffusers,
    facts_of,
    in_order,
    main,
    of_whole,
    parse,
    results_of,
    ways_of,
)
from benchmarks.models.published import PublishedModel
from benchmarks.peers import capture
from benchmarks.peers.capture import CapturedPeer
from benchmarks.peers.published import OpenPeer
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import ExchangeRules
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_models, tiny_qwen

OURS = "ours, ulysses"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_qwen.qwen(tmp_path_factory.mktemp("qwen")))


@pytest.mark.parametrize("branches", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_floor_comes_before_the_times_and_counts_every_branch(
    folder: str, branches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sizes = ["--size", "96x96", "--tokens", "20", "--repeats", "2", "--branches", str(branches), "--out", str(out)]
    called = patch.object(sys, "argv", ["benchmarks.model_step", folder, *sizes, "--makers", "eager", "ours"])
    no_gpu = patch("torch.cuda.is_available", return_value=False)
    with called, no_gpu, patch("os._exit", side_effect=SystemExit) as end, pytest.raises(SystemExit):
        main()
    end.assert_called_once_with(0)
    _, floor, *results, last = capsys.readouterr().out.splitlines()
    assert f"branches {branches}, batch 1, ranks 1" in floor
    assert "floor_ms" in floor
    assert [json.loads(line)["maker"] for line in results] == ["diffusers eager", "ours, ulysses"]
    document = json.loads(last)
    assert document["results"] == [json.loads(line) for line in results]
    assert (json.loads(out.read_text()), document["python_s"] > 0) == (document, True)
    assert document["results"][1]["branches"] == branches
    assert document["results"][1]["relative_error"] < 1e-5


def test_pictures_in_one_forward_are_as_good_as_diffusers_and_not_alike(folder: str) -> None:
    model = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20, 1, batch=2)
    first, second = model.call().view(2, -1)
    assert (first - second).norm() > 0.1 * first.norm()
    said = facts_of(model, 1)
    assert said["batch"] == 2
    makers = ("ours", "ours, fp8 attention", "ours in parts")
    with patch.object(TorchEngine, "use", autospec=True, side_effect=TorchEngine.use) as use:
        exact, fp8, in_parts = results_of(model, said, Arguments(makers=makers, repeats=1), 1)
    assert max(one["relative_error"] for one in (exact, in_parts)) < 1e-5
    assert [call.args[1] for call in use.call_args_list] == [ExchangeRules(parts_from_tokens=1)]
    assert fp8["maker"] == "ours, fp8 attention, ulysses"
    assert 1e-4 < fp8["relative_error"] < 0.1


def test_only_exchanges_that_an_autotuner_changes_are_timed_in_two_ways() -> None:
    """It does not change rings."""
    model: Any = SimpleNamespace(module=torch.nn.Linear(1, 1))
    arguments = Arguments(strategies=("ulysses", "allgather_kv", "ring"))
    ways = ways_of(model, torch.zeros(1), arguments, 2, OpenPeer(model))
    assert [name for name, _ in ways["ours in parts"]] == ["ours, in parts, ulysses", "ours, in parts, allgather_kv"]
    assert [name for name, _ in ways["ours"]] == ["ours, ulysses", "ours, allgather_kv", "ours, ring"]


def test_a_strategy_that_these_ranks_cannot_use_leaves_other_makers_their_turn() -> None:
    model: Any = SimpleNamespace(module=torch.nn.Linear(1, 1))
    ways = ways_of(model, torch.zeros(1), Arguments(strategies=("guidance", "ulysses")), 3, OpenPeer(model))
    assert [name for name, _ in ways["ours in parts"]] == ["ours, in parts, guidance", "ours, in parts, ulysses"]
    assert "error" in attempt(ways["ours in parts"][0][1])


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_some_blocks_are_compared_with_as_many_of_diffusers(folder: str, num_blocks: int) -> None:
    """The whole model gives another answer, and its time is estimated from the share of blocks."""
    model = PublishedModel.made(
        folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20, num_blocks=num_blocks
    )
    said = facts_of(model, 1)
    assert said["blocks"] == f"{num_blocks} of 2"
    assert (model.call().equal(model._values(model.whole, model.own_calls))) == (num_blocks == 2)
    (ours,) = results_of(model, said, Arguments(makers=("ours",), repeats=1), 1)
    assert ours["relative_error"] < 1e-5
    assert ours["whole_ms"] == round(ours["median_ms"] * 2 / num_blocks, 2)


def test_unequal_shares_and_failures_have_no_estimate(folder: str) -> None:
    model = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20, num_blocks=1)
    unequal = patch.object(PublishedModel, "blocks", return_value=((1, 2), (1, 3)))
    assert of_whole(model, {"error": "failed"}) == {"error": "failed"}
    assert of_whole(model, {"median_ms": 3.0}) == {"median_ms": 3.0, "whole_ms": 6.0}
    with unequal:
        assert of_whole(model, {"median_ms": 3.0}) == {"median_ms": 3.0}


@pytest.mark.parametrize("words", [["--blocks", "0"], ["--blocks", "1", "--makers", "ours", "sglang-captured"]])
def test_blocks_that_cannot_be_left_out_are_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert "keep at least 1 block" in (said := capsys.readouterr().err) or "sglang-captured always have all" in said


def test_errors_are_those_against_float32_if_asked_for(folder: str) -> None:
    """Both have the rounding of bfloat16. Compared with itself, the module has none."""
    size, errors = Size.parse("96x96"), {}
    for exact in (True, False):
        model = PublishedModel.made(folder, torch.device("cpu"), torch.bfloat16, size, 20)
        arguments = Arguments(makers=("eager", "ours"), repeats=1, exact=exact)
        errors[exact] = [one["relative_error"] for one in results_of(model, facts_of(model, 1), arguments, 1)]
    assert errors[False][0] == 0
    assert 1e-3 < errors[True][0] < 0.05
    assert errors[True][1] < 1.5 * errors[True][0]


def test_what_measured_nothing_does_not_end_with_0(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for models, makers in (
        (["no/such/model"], ["eager"]),
        ([folder, "no/such/model"], ["eager"]),
        ([folder], ["sglang"]),
    ):
        words = ["benchmarks.model_step", *models, "--size", "96x96", "--tokens", "20", "--repeats", "1"]
        called = patch.object(sys, "argv", [*words, "--makers", *makers])
        with called, patch("os._exit", side_effect=SystemExit) as end, pytest.raises(SystemExit):
            main()
        end.assert_called_once_with(1)
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [one["model"] for one in said["results"] if "error" not in one] == models[:-1]
    if dist.is_initialized():  # the peer did it, in a process that was to end
        dist.destroy_process_group()


def test_a_precision_is_that_of_makers_that_have_it(folder: str) -> None:
    model = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20)
    arguments = Arguments(makers=("eager", "ours", "sglang"), repeats=1, precision="fp8")
    with patch.object(OpenPeer, "step", side_effect=ValueError("none here")):
        found = list(results_of(model, {}, arguments, 1))
    assert [one["precision"] for one in found] == ["native", "fp8", "fp8"]
    assert found[0]["relative_error"] == 0 < found[1]["relative_error"] < 0.2


def test_sizes_follow_each_other() -> None:
    assert parse(["--size", "96x96", "--size", "64x32"]).size == [Size.parse("96x96"), Size.parse("64x32")]
    assert parse([]).size == (None,)


def test_a_captured_peer_says_how_far_its_answer_is_from_its_eager_one(folder: str) -> None:
    model, closed = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20), []
    graph = SimpleNamespace(replay=lambda: None, reset=lambda: closed.append(True))
    captured = patch.object(capture, "captured", lambda step: CapturedPeer(graph=graph, answer=step(), error=0.002))
    peer = patch.object(OpenPeer, "step", return_value=model.call)
    with captured, peer:
        (found,) = results_of(model, {}, Arguments(makers=("sglang-captured",), repeats=1), 1)
    assert (found["capture_error"], found["relative_error"], closed) == (0.002, 0.0, [True])
    assert found["maker"] == "sglang-captured"


def test_a_peer_with_another_answer_is_an_error(folder: str) -> None:
    model = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20)
    with patch.object(OpenPeer, "step", return_value=lambda: 1.2 * model.call()):
        (found,) = results_of(model, {}, Arguments(makers=("sglang",), repeats=1), 1)
    assert "wrong answer: relative error 0.200" in found["error"]


def test_kernels_share_a_steps_time() -> None:
    spans = {"nvjet_a": (0, 3), "ncclDevKernel": (2, 9), "flash_fwd": (5, 6), "triton_pass": (12, 15)}
    kernels = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=1000 * start, end=1000 * end))
        for name, (start, end) in spans.items()
    ]
    assert kernel_times.split_of_time(kernels) == (
        "5.00 ms: GEMMs 1.00, exchange 2.33, attention 0.33, passes 1.00, exchange alone 1.67, idle 1.00"
    )


def test_makers_come_in_their_order_and_what_cannot_be_captured_is_an_error(folder: str) -> None:
    makers = ("ours", "sglang-captured", "eager-captured", "eager")
    assert in_order(makers) == ["eager-captured", "eager", "ours", "sglang-captured"]
    model = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20, 1)
    captured, eager, ours = results_of(model, {}, Arguments(makers=(*makers[2:], "ours"), repeats=1), 1)
    assert [one["maker"] for one in (captured, eager, ours)] == ["diffusers eager-captured", "diffusers eager", OURS]
    assert "captured on a GPU alone" in captured["error"]
    assert {"error", "capture_error"}.isdisjoint({*eager, *ours})


def test_what_takes_pictures_one_by_one_makes_no_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one by one, not 2"):
        PublishedModel.made(
            str(tiny_models.z_image(tmp_path)), torch.device("cpu"), torch.float32, None, 32, 1, batch=2
        )


def test_what_diffusers_cannot_divide_is_said(folder: str) -> None:
    """diffusers divides by the number of accelerators, and CPUs are none."""
    model = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20, 1)
    with pytest.raises(ValueError, match="over GPUs alone, not over CPUs: leave it out of --makers"):
        diffusers(model, torch.zeros(1), Arguments(), 2)
