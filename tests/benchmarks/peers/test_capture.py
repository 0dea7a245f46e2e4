"""Steps in one graph are compared with eager ones, and a failed capture gives its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peers import capture


def recorded_as(monkeypatch: pytest.MonkeyPatch, replay: Any) -> Tensor:
    """Stand in for a GPU whose graph runs ``replay`` on the answer."""
    answer = torch.full((4,), 7.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    graph = SimpleNamespace(replay=lambda: replay(answer))
    monkeypatch.setattr(capture, "_recorded", lambda step: (graph, answer))
    return answer


def test_a_replay_is_compared_with_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_as(monkeypatch, lambda answer: answer.copy_(torch.full((4,), 2.002)))
    step = capture.captured(lambda: torch.full((4,), 2.0))
    assert step.error == pytest.approx(0.001, rel=0.01)
    assert step().tolist() == pytest.approx([2.002] * 4)


def test_a_replay_that_writes_nothing_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording leaves the right answer in its memory."""
    recorded_as(monkeypatch, lambda answer: None)
    with pytest.raises(AssertionError, match="wrong answer"):
        capture.captured(lambda: torch.full((4,), 7.0))


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ValueError, match="leave out makers that end with -captured"):
        capture.captured(lambda: torch.zeros(1))


def test_a_reason_names_the_first_line_and_the_places() -> None:
    def synchronize() -> None:
        raise RuntimeError("operation not permitted\nSearch for it in the documents")

    with pytest.raises(RuntimeError) as raised:
        synchronize()
    said = capture.reason_of(raised.value)
    assert said.startswith("RuntimeError: operation not permitted at peers/test_capture.py:")
    assert ", called by peers/test_capture.py:" in said
    assert "documents" not in said


@pytest.mark.gpu
def test_a_graph_reads_its_inputs_where_they_are_and_what_synchronizes_has_none() -> None:
    x = torch.ones(4, device="cuda")
    step = capture.captured(lambda: x * 2)
    x.fill_(3)
    assert step().tolist() == [6] * 4
    step.close()
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match=r"cannot be captured: .* at peers/test_capture.py"):
        capture.captured(lambda: x * x.sum().item())
    assert torch.cuda.current_stream() == before
    assert torch.randn(4, device="cuda").shape == (4,)
