"""A training step as a CUDA graph is the eager step: same losses, same weights, from the same seed."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.fast import WARM_UP_CALLS, graphed, uncompiled
from training.loop import Budget, Run, fit, step_of

NUM_STEPS = WARM_UP_CALLS + 60


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.out(x)
        return out


def _trained(out: Path, graph: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    module = _Block().cuda()
    budget = Budget(out=out, minutes=5, total_minutes=5, learning_rate=3e-3, muon=2.0, decay_from=0.99)
    run, losses = Run(module=module, budget=budget), []
    weights = torch.randn(32, 8, device="cuda")

    def loss_of(batch: int) -> Tensor:
        x = torch.randn(batch, 32, device="cuda")
        error = (module(x) - x @ weights).square()
        return torch.stack((error.mean(), 0.1 * error.abs().mean()))

    steps = [step_of(run, partial(loss_of, size), graph=graph) for size in (64, 96)]

    def step() -> Tensor:
        losses.append(steps[run.step % 2]())
        return losses[-1]

    fit(run, step, max_steps=NUM_STEPS)
    weights_and_means = [*module.parameters(), *run.average.parameters()]
    return [loss.sum().item() for loss in losses], [tensor.detach().clone() for tensor in weights_and_means]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphed_and_eager_steps_train_alike(tmp_path: Path) -> None:
    eager_losses, eager_weights = _trained(tmp_path / "eager", graph=False)
    losses, weights = _trained(tmp_path / "graph", graph=True)
    assert losses == pytest.approx(eager_losses, rel=0.02)
    assert losses[-2] < 0.9 * losses[0]  # the last one of the same batch size
    for ours, theirs in zip(weights, eager_weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-3)


def test_off_means_the_function_itself() -> None:
    def function() -> Tensor:
        return torch.zeros(1)

    assert graphed(function, on=False) is function


def test_uncompiled_runs_the_function_as_it_is_written() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    function = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
    with uncompiled(on=True):
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    assert not compiled
    with uncompiled(on=False):
        assert torch.equal(function(torch.ones(5)), torch.full((5,), 2.0))
    assert len(compiled) == 1
