"""Steps are timed under the right modes, compared with the module, and reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import kernel_times
from benchmarks.denoise_step import __main__ as denoise_step
from benchmarks.denoise_step import runners
from benchmarks.denoise_step.cases import CASES, Case
from benchmarks.denoise_step.runners import Bench
from benchmarks.peers import capture, vllm_omni
from benchmarks.peers.capture import CapturedPeer

EAGER = "eager/1024/w1/bf16/uncaptured"
OPTIONS = ("/uncaptured", "")


def case_of(maker: str) -> Case:
    return next(case for case in CASES if case.maker == maker)


def test_prepared_steps_are_timed_as_they_were_prepared() -> None:
    """Gradients are off. Otherwise compiled code would be made again while the clock runs."""
    modes: list[bool] = []
    bench: Any = SimpleNamespace(small=True, fitting=lambda case: dataclasses.replace(case, repeats=2))
    denoise_step.time_case(bench, case_of("xdit"), lambda: modes.append(torch.is_grad_enabled()))
    assert set(modes) == {False}


def test_vllm_omni_runs_in_the_mode_that_its_worker_runs_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []

    def transformer(**_: Any) -> tuple[None]:
        modes.append(torch.is_inference_mode_enabled())
        return (None,)

    monkeypatch.setattr(vllm_omni, "_transformer", lambda *_: transformer)
    vllm_omni.vllm_omni_step(None, {}, compiled=True)()
    assert modes == [True]


def test_compiled_blocks_are_compared_with_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(rank=0, world=1, small=True)
    monkeypatch.setattr(
        bench.module, "compile_repeated_blocks", lambda **_: bench.module.proj_out.bias.add_(1.0), raising=False
    )
    with pytest.raises(AssertionError, match="wrong answer"):
        bench.run(case_of("blocks"))


def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, Any]:
    """Returns the program's status, what it printed, and the document in the last line."""
    monkeypatch.setattr("sys.argv", ["benchmarks.denoise_step", *words])
    with patch("os._exit", side_effect=SystemExit) as end, pytest.raises(SystemExit):
        denoise_step.main()
    (status,) = end.call_args.args
    printed = capsys.readouterr().out
    return status, printed, json.loads(printed.splitlines()[-1])


def test_ours_is_timed_and_right_on_a_small_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("--only", "fast/1024/w1/bf16", "xdit/1024/w4/bf16/ulysses/uncaptured", "--out", str(out))
    status, _, document = run_main(monkeypatch, capsys, *words)
    (result,) = document["results"]
    assert (status, result["case"]) == (0, "fast/1024/w1/bf16")
    assert 0 < result["lowest_ms"] <= result["median_ms"]
    assert result["relative_error"] < 1e-4
    assert json.loads(out.read_text()) == document


def test_named_cases_run_in_their_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = (EAGER, "fast/1024/w1/bf16")
    _, _, document = run_main(monkeypatch, capsys, "--only", *names)
    assert [result["case"] for result in document["results"]] == list(names)
    assert document["python_s"] > 0


def test_a_peer_that_cannot_be_captured_is_an_error_and_never_its_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(rank=0, world=1, small=True)
    monkeypatch.setattr(bench, "references_for_peers", lambda: None)
    monkeypatch.setattr(runners, "peer_step", lambda *_: lambda: bench.reference(128, 1))
    eager, captured = (next(case for case in CASES if case.name == f"sglang/1024/w1/bf16{end}") for end in OPTIONS)
    assert denoise_step.time_case(bench, eager)["median_ms"] > 0
    assert "captured on a GPU alone" in denoise_step.time_case(bench, captured)["error"]


def test_a_captured_peer_says_how_far_its_answer_is_from_its_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, closed = Bench(rank=0, world=1, small=True), []
    monkeypatch.setattr(bench, "references_for_peers", lambda: None)
    monkeypatch.setattr(runners, "peer_step", lambda *_: lambda: bench.reference(128, 1))
    graph = SimpleNamespace(replay=lambda: None, reset=lambda: closed.append(True))
    monkeypatch.setattr(capture, "captured", lambda step: CapturedPeer(graph=graph, answer=step(), error=0.002))
    (case,) = (case for case in CASES if case.name == "sglang/1024/w1/bf16")
    result = denoise_step.time_case(bench, case)
    assert (result["capture_error"], result["relative_error"], closed) == (0.002, 0.0, [True])


def test_gangs_that_meet_prepare_all_before_one_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--only", "fast/1024/w1/bf16", EAGER, "--meet", str(tmp_path), "--turn", "1", "0")
    status, _, document = run_main(monkeypatch, capsys, *words)
    assert (status, len(document["results"])) == (0, 2)
    assert all(one["median_ms"] > 0 for one in document["results"])
    assert {file.name for file in tmp_path.iterdir()} == {"ready-0-0", "left-0"}


def test_a_profile_has_the_steps_kernels_and_no_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed, document = run_main(monkeypatch, capsys, "--only", EAGER, "--profile")
    assert (status, "aten::" in printed) == (0, True)
    assert document["results"][0].keys() == {"case", "relative_error"}


def test_a_case_that_fails_leaves_the_others_and_all_failing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Bench.prepare

    def prepare(bench: Bench, case: Case) -> Any:
        if case.precision == "fp8":
            raise RuntimeError("out of memory")
        return own(bench, case)

    monkeypatch.setattr(Bench, "prepare", prepare)
    for words, expected in ((("fast/1024/w1/fp8", EAGER), 0), (("fast/1024/w1/fp8",), 1)):
        status, printed, document = run_main(monkeypatch, capsys, "--only", *words)
        failed = [one["case"] for one in document["results"] if "error" in one]
        assert (status, failed) == (expected, ["fast/1024/w1/fp8"])
        assert "out of memory" in printed


def test_kernels_share_a_steps_time() -> None:
    spans = {"nvjet_a": (0, 3), "ncclDevKernel": (2, 9), "flash_fwd": (5, 6), "triton_pass": (12, 15)}
    kernels = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=1000 * start, end=1000 * end))
        for name, (start, end) in spans.items()
    ]
    assert kernel_times.split_of_time(kernels) == (
        "5.00 ms: GEMMs 1.00, exchange 2.33, attention 0.33, passes 1.00, exchange alone 1.67, idle 1.00"
    )
