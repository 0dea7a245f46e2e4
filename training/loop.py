"""The training loop that all models share: budget, learning rate, averaged weights, resumable checkpoints, loss log."""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Muon
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.fast import TensorFunction, graphed
from training.optimizers import optimizers

WARMUP_STEPS = 200
LOG_EVERY = 50
SAVE_EVERY_S = 60.0
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long to train, and at which rates. `total_minutes` shapes the learning rate, `minutes` is this piece of it.

    `muon` is the blocks' learning rate over that of the rest; 0 trains everything with AdamW."""

    out: Path
    minutes: float
    total_minutes: float
    learning_rate: float
    muon: float = 0.0
    resume: bool = False
    decay_from: float = 0.55
    ema_decay: float = 0.999


@dataclass(kw_only=True)
class Run:
    """A training run: everything that a checkpoint keeps. `average` holds the moving average of the weights."""

    module: nn.Module
    budget: Budget
    step: int = 0
    elapsed_s: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizers = optimizers(self.module, with_muon=self.budget.muon > 0)
        self.average = AveragedModel(self.module)
        self.budget.out.mkdir(parents=True, exist_ok=True)
        if self.budget.resume and self.path.exists():
            self.load()

    @property
    def path(self) -> Path:
        return self.budget.out / "resume.pt"

    @property
    def progress(self) -> float:
        """Share of the whole time budget that is used up."""
        return self.elapsed_s / (self.budget.total_minutes * 60)

    def save(self) -> None:
        """Write the checkpoint beside its old version first, so that a cut run never leaves half a file."""
        state = {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "log": self.log,
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)
        (self.budget.out / "loss.json").write_text(json.dumps(self.log))

    def load(self) -> None:
        state = torch.load(self.path, weights_only=True, map_location=next(self.module.parameters()).device)
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average.load_state_dict(state["average"])
        self.step, self.elapsed_s, self.log = state["step"], state["elapsed_s"], state["log"]

    def use_average(self) -> None:
        """Put the averaged weights in the module."""
        self.module.load_state_dict(self.average.module.state_dict())


def _gradients(run: Run, loss_of: TensorFunction) -> Tensor:
    """Leave the clipped gradients in the parameters and return the losses. Nothing waits for the GPU, and gradients
    stay in the memory where they are, so that CUDA graphs can hold it all."""
    run.module.zero_grad(set_to_none=False)
    losses = loss_of()
    losses.sum().backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.module.parameters(), LARGEST_GRADIENT)
    return losses.detach()


def _update(run: Run) -> None:
    """Make one step of the optimisers and of the average. It cannot be part of a CUDA graph, which would repeat the
    rates and decays of the step that it was captured at."""
    for optimizer in run.optimizers:
        optimizer.step()
    decay = average_decay(run.budget, run.step)
    run.average.multi_avg_fn = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    run.average.update_parameters(run.module)


def step_of(run: Run, loss_of: TensorFunction, *, graph: bool = False) -> TensorFunction:
    """Return a function that makes one whole update of the run's weights and returns the losses. `loss_of` gives one
    or several losses to add up; with `graph`, it and its gradients become a CUDA graph."""
    gradients = graphed(lambda: _gradients(run, loss_of), on=graph)

    def step() -> Tensor:
        losses = gradients()
        _update(run)
        return losses

    return step


def average_decay(budget: Budget, step: int) -> float:
    """Return how much of the average a step keeps: little at first, so that it soon forgets the untrained weights."""
    return min(budget.ema_decay, (1 + step) / (10 + step))


def learning_rate(budget: Budget, step: int, progress: float) -> float:
    """Return a rate with a linear warm-up, a plateau, and a linear decay to zero by the end of the time budget."""
    remaining = (1 - progress) / (1 - budget.decay_from)
    return budget.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS, max(remaining, 0.0))


def _set_rates(run: Run) -> None:
    rate = learning_rate(run.budget, run.step, run.progress)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * run.budget.muon if isinstance(optimizer, Muon) else rate


def _record(run: Run, losses: list[Tensor]) -> None:
    """Log the mean of the first loss as "loss", those of others as "loss 2" and so on."""
    first, *more = torch.stack([loss.reshape(-1) for loss in losses]).mean(0).tolist()
    if not math.isfinite(first + sum(more)):
        raise FloatingPointError(f"the losses are {[first, *more]} after step {run.step}; lower the learning rate")
    point = {"step": run.step, "elapsed_s": round(run.elapsed_s, 1), "loss": first}
    run.log.append(point | {f"loss {number}": loss for number, loss in enumerate(more, start=2)})
    if run.step % (10 * LOG_EVERY) == 0 or run.step == LOG_EVERY:
        print(f"{run.budget.out.name} step {run.step} {run.elapsed_s:.0f} s losses {first:.5f} {more}", flush=True)


def fit(run: Run, step: TensorFunction, max_steps: int | None = None) -> None:
    """Call `step` (of `step_of`) until this piece's minutes, the whole budget or `max_steps` are over; then save."""
    before_s, start_s, saved_s = run.elapsed_s, time.monotonic(), time.monotonic()
    end_s = min(before_s + run.budget.minutes * 60, run.budget.total_minutes * 60)
    last_step = float("inf") if max_steps is None else run.step + max_steps
    losses: list[Tensor] = []
    while run.elapsed_s < end_s and run.step < last_step:
        _set_rates(run)
        losses.append(step())
        run.step += 1
        if run.step % LOG_EVERY == 0:
            _record(run, losses)
            losses = []
        run.elapsed_s = before_s + time.monotonic() - start_s
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            run.save()
            saved_s = time.monotonic()
    run.save()
