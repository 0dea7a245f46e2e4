"""The training loop all models share: time budget, learning rate, averaged weights, resumable checkpoints, loss log."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from pipelines.training.fast import Step

WARMUP_STEPS = 200
LOG_EVERY = 50
SAVE_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How long to train. `total_minutes` shapes the learning rate, `minutes` is this piece of it."""

    out: Path
    minutes: float
    total_minutes: float
    learning_rate: float
    resume: bool = False
    decay_from: float = 0.55
    ema_decay: float = 0.999


class Average:
    """Exponential moving average of a module's parameters, with a short memory at the start."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.mean = [parameter.detach().clone() for parameter in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, list(self.live), 1 - decay)

    @torch.no_grad()
    def copy_to_module(self) -> None:
        """Puts the averaged weights in the module."""
        torch._foreach_copy_(list(self.live), self.mean)


def _groups(module: nn.Module) -> list[dict[str, object]]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


@dataclass(kw_only=True)
class Run:
    """Everything that a checkpoint keeps."""

    module: nn.Module
    plan: Plan
    step: int = 0
    elapsed_s: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        fused = next(self.module.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(_groups(self.module), lr=1e-3, betas=(0.9, 0.98), fused=fused)
        self.average = Average(self.module, self.plan.ema_decay)
        self.plan.out.mkdir(parents=True, exist_ok=True)
        if self.plan.resume and self.path.exists():
            self.load()

    @property
    def path(self) -> Path:
        return self.plan.out / "resume.pt"

    def save(self) -> None:
        """Writes the checkpoint beside its old version first, so that a cut run never leaves half a file."""
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mean": self.average.mean,
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "log": self.log,
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)
        (self.plan.out / "loss.json").write_text(json.dumps(self.log))

    def load(self) -> None:
        state = torch.load(self.path, weights_only=True, map_location=next(self.module.parameters()).device)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch._foreach_copy_(self.average.mean, state["mean"])
        self.step, self.elapsed_s, self.log = state["step"], state["elapsed_s"], state["log"]


def learning_rate(plan: Plan, step: int, progress: float) -> float:
    """Linear warm-up, a plateau, then linear decay to zero by the end of the time budget."""
    remaining = (1 - progress) / (1 - plan.decay_from)
    return plan.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS, max(remaining, 0.0))


def _one_step(run: Run, step: Step) -> Tensor:
    progress = run.elapsed_s / (run.plan.total_minutes * 60)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.plan, run.step, progress)
    loss = step()
    nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
    run.optimizer.step()
    run.average.update(run.step)
    run.step += 1
    return loss


def _record(run: Run, losses: list[Tensor]) -> None:
    loss = torch.stack(losses).mean().item()
    run.log.append({"step": run.step, "elapsed_s": round(run.elapsed_s, 1), "loss": loss})
    if run.step % (10 * LOG_EVERY) == 0 or run.step == LOG_EVERY:
        print(f"{run.plan.out.name} step {run.step} {run.elapsed_s:.0f} s loss {loss:.5f}", flush=True)


def fit(run: Run, step: Step, max_steps: int | None = None) -> None:
    """Trains until this piece's minutes, the whole budget or `max_steps` is used up, then saves."""
    before_s, start_s, saved_s = run.elapsed_s, time.monotonic(), time.monotonic()
    end_s = min(before_s + run.plan.minutes * 60, run.plan.total_minutes * 60)
    last_step = float("inf") if max_steps is None else run.step + max_steps
    losses: list[Tensor] = []
    while run.elapsed_s < end_s and run.step < last_step:
        losses.append(_one_step(run, step))
        if run.step % LOG_EVERY == 0:
            _record(run, losses)
            losses = []
        run.elapsed_s = before_s + time.monotonic() - start_s
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            run.save()
            saved_s = time.monotonic()
    run.save()
