"""A resumed run equals an uninterrupted one, and the schedule is right."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.flow import noisy, sample_sigma
from training.loop import WARMUP_STEPS, Budget, Run, fit, learning_rate, step_of


def _budget(out: Path, resume: bool, muon: float) -> Budget:
    return Budget(out=out, minutes=5, total_minutes=5, learning_rate=1e-2, muon=muon, resume=resume, decay_from=0.99)


def _run(out: Path, resume: bool = False, muon: float = 0.0) -> tuple[Run, Callable[[], Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    run = Run(module=module, budget=_budget(out, resume, muon))

    def loss_of() -> Tensor:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(run.step))
        error = (module(x) - x.flip(-1)).square()
        return torch.stack((error[:8].mean(), error[8:].mean()))

    return run, step_of(run, loss_of)


@pytest.mark.parametrize("muon", [0.0, 1.0])
def test_resuming_gives_the_same_weights(tmp_path: Path, muon: float) -> None:
    whole, step = _run(tmp_path / "whole", muon=muon)
    fit(whole, step, max_steps=100)
    part, step = _run(tmp_path / "part", muon=muon)
    fit(part, step, max_steps=40)
    rest, step = _run(tmp_path / "part", resume=True, muon=muon)
    assert rest.step == 40
    assert rest.elapsed_s > 0
    fit(rest, step, max_steps=60)
    assert rest.step == whole.step == 100
    for ours, theirs in zip(rest.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    for mean, whole_mean in zip(rest.average.parameters(), whole.average.parameters(), strict=True):
        torch.testing.assert_close(mean, whole_mean, rtol=1e-4, atol=1e-6)
    assert [point["step"] for point in rest.log] == [50, 100]


def test_training_learns(tmp_path: Path) -> None:
    run, step = _run(tmp_path)
    fit(run, step, max_steps=300)
    assert run.log[-1]["loss"] < 0.3 * run.log[0]["loss"]


def test_a_diverging_run_stops(tmp_path: Path) -> None:
    run, _ = _run(tmp_path)
    with pytest.raises(FloatingPointError, match="after step 50; lower the learning rate"):
        fit(run, lambda: torch.tensor(float("nan")), max_steps=100)


def test_learning_rate_rises_stays_and_falls(tmp_path: Path) -> None:
    budget = Budget(out=tmp_path, minutes=1, total_minutes=1, learning_rate=1.0, decay_from=0.5)
    assert learning_rate(budget, 0, 0.0) == pytest.approx(1 / WARMUP_STEPS)
    assert learning_rate(budget, WARMUP_STEPS, 0.4) == 1.0
    assert learning_rate(budget, 10_000, 0.75) == pytest.approx(0.5)
    assert learning_rate(budget, 10_000, 1.2) == 0.0


def test_the_average_has_a_short_memory_at_first_and_replaces_the_weights(tmp_path: Path) -> None:
    """The reference is the definition, written out in float64: mean += (1 - keep) * (weight - mean)."""
    torch.manual_seed(0)
    module = nn.Linear(1, 1, bias=False)
    budget = Budget(out=tmp_path, minutes=5, total_minutes=5, learning_rate=0.5, ema_decay=0.9)
    run = Run(module=module, budget=budget)
    step, weights = step_of(run, lambda: (module.weight - 3).square().sum()), []

    def recorded() -> Tensor:
        losses = step()
        weights.append(module.weight.item())
        return losses

    fit(run, recorded, max_steps=40)
    mean = weights[0]
    for number, weight in enumerate(weights[1:], start=1):
        mean += (1 - min(0.9, (1 + number) / (10 + number))) * (weight - mean)
    assert abs(mean - weights[-1]) > 0.01
    run.use_average()
    assert module.weight.item() == pytest.approx(mean, rel=1e-5)


def test_noisy_latents_lie_on_the_path_the_velocity_follows() -> None:
    latents = torch.randn(6, 2, 3, 3)
    sigma_B = sample_sigma(6, 3.0, latents.device)
    noised, velocity = noisy(latents, sigma_B)
    torch.testing.assert_close(noised - sigma_B.view(-1, 1, 1, 1) * velocity, latents)


def test_a_larger_shift_means_more_noise() -> None:
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    means = [sample_sigma(20_000, shift, cpu, layout_shift=1.0).mean().item() for shift in (1.0, 2.0, 4.0)]
    assert means[0] == pytest.approx(0.5, abs=0.02)
    assert means[0] < means[1] < sample_sigma(20_000, 2.0, cpu, layout_shift=3.0).mean() < means[2] < 1
