"""Calls run in CUDA graphs, with fakes for CUDA's streams and graphs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from transformers import masking_utils
from transformers.modeling_outputs import BaseModelOutput

from engines.fast import graph
from pipelines.blocks import captured as captured_module
from pipelines.blocks import compilation
from pipelines.blocks.captured import CapturedForward, form_of
from pipelines.blocks.compilation import PreparedCaptures, compile_calls

CPU = torch.device("cpu")
Graphs = list[Mock]


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    """Yield the captured graphs, whose replays do nothing by themselves."""
    made: Graphs = []
    names = ("current_stream", "graph_pool_handle", "set_stream", "synchronize")
    contexts = dict.fromkeys(("graph", "stream"), Mock(side_effect=lambda *_, **__: nullcontext()))

    def make() -> Mock:
        made.append(Mock())
        return made[-1]

    cuda: dict[str, Any] = {**dict.fromkeys(names, Mock()), **contexts, "CUDAGraph": make}
    with patch.object(graph, "named_stream"), patch.multiple(torch.cuda, **cuda):
        yield made


def test_each_form_is_captured_once_and_results_are_copies(graphs: Graphs) -> None:
    memory, calls = torch.zeros(2), list[Any]()

    def forward(x: torch.Tensor, *, flag: bool) -> BaseModelOutput:
        calls.append(flag)
        return BaseModelOutput(last_hidden_state=memory.copy_(x), hidden_states=(memory,))

    captured = CapturedForward(forward, CPU)
    first = captured(torch.ones(2), flag=True)
    assert calls == [True] * 3, "twice to warm up, once to record"
    memory.zero_()  # the next replay would do this
    assert first.last_hidden_state.tolist() == first.hidden_states[0].tolist() == [1, 1]
    captured(torch.zeros(2), flag=True)
    assert (len(graphs), graphs[0].replay.call_count) == (1, 2)
    captured(torch.zeros(2), flag=False)
    assert len(graphs) == 2


def test_a_call_that_was_not_prepared_runs_as_one_that_was(graphs: Graphs) -> None:
    """Masks and the layout of arguments decide among kernels, whose results differ by rounding."""
    seen: list[tuple[bool, bool]] = []

    def forward(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append((masking_utils.is_tracing(x), x.is_contiguous() and mask.is_contiguous()))
        return x

    prepared = PreparedCaptures(forward, CPU)
    wide, tall = (torch.zeros(*shape).T for shape in ((2, 3), (3, 2)))
    with compile_calls([prepared]):
        prepared(wide, mask=wide)
    num_before = len(seen)
    prepared(tall, mask=tall)
    assert seen[num_before:] == [(True, True)]
    assert set(seen) == {(True, True)}


def test_the_form_of_a_call_is_computed_once(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Mock(side_effect=form_of)
    for module in (captured_module, compilation):
        monkeypatch.setattr(module, "form_of", count)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    prepared = PreparedCaptures(forward, CPU)
    with compile_calls([prepared]):
        prepared(torch.zeros(1))
    for num_entries in (1, 1, 2):
        prepared(torch.zeros(num_entries))
    assert count.call_count == 4
    assert (len(graphs), graphs[0].replay.call_count) == (1, 3)


def test_a_replay_reads_the_arguments_of_its_call(graphs: Graphs) -> None:
    captured = CapturedForward(lambda x, mask: (x * mask,), CPU)
    captured(torch.ones(2), mask=torch.ones(2))
    inputs = captured._calls[form_of((torch.ones(2),), {"mask": torch.ones(2)})]._step.inputs  # type: ignore[union-attr]
    captured(torch.tensor([2.0, 3.0]), mask=torch.zeros(2))
    assert {name: x.tolist() for name, x in inputs.items()} == {"0": [2, 3], "mask": [0, 0]}


def test_what_cannot_be_captured_runs_as_it_is(graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        tries.append(1)
        if len(tries) == 3:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return x + 1

    captured = CapturedForward(forward, CPU)
    for _ in range(2):
        assert captured(torch.zeros(1)).tolist() == [1]
    assert len(tries) == 5
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "operation not permitted when stream is capturing"
    ]


def test_a_capture_that_failed_is_ended(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is notified, and a capture that succeeds resets CUDA's generator."""
    steps = list[int]()
    end = Mock(side_effect=lambda *_: steps.append(len(graphs)))
    monkeypatch.setattr(captured_module, "end_failed_capture", end)
    captured = CapturedForward(Mock(side_effect=[None, None, RuntimeError("refused"), 7]), CPU)
    pool = captured._pool
    assert captured(torch.zeros(1)) == 7
    end.assert_called_once_with(CPU, pool.handle)
    assert steps == [1]
    assert len(graphs) == 2
    assert captured._pool is not pool


@pytest.mark.parametrize("argument", ["inside", "elsewhere"])
def test_arguments_that_a_replay_would_not_read_run_as_they_are(
    argument: str, graphs: Graphs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph reads the tensors that are arguments themselves, on its device."""
    monkeypatch.setattr(captured_module, "form_of", lambda *_: "the same form")
    seen: list[Any] = []
    captured = CapturedForward(lambda x, other: seen.append(other), CPU)
    others = [[torch.ones(1)], [torch.zeros(1)]] if argument == "inside" else [torch.ones(1, device="meta")] * 2
    for other in others:
        captured(torch.zeros(1), other=other)
    assert all(one is other for one, other in zip(seen, others, strict=True))
    assert not graphs
    assert len(caplog.messages) == 1


def test_the_arguments_of_the_capture_are_released(graphs: Graphs) -> None:
    captured = CapturedForward(lambda x, mask: (x * mask,), CPU)
    first = torch.ones(2)
    captured(first, mask=first)
    kept = weakref.ref(first)
    del first
    assert kept() is None


def test_masks_are_made_without_a_look_at_them(graphs: Graphs) -> None:
    seen: list[bool] = []
    plain = masking_utils.is_tracing

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(masking_utils.is_tracing(x))
        return x

    CapturedForward(forward, CPU)(torch.zeros(1))
    assert seen == [True] * 3, "in the runs before the capture as well"
    assert masking_utils.is_tracing is plain
