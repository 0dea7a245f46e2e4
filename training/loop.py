"""The training loop all models share: time budget, learning rate, averaged weights, resumable checkpoints, loss log."""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from training.fast import Step
from training.muon import Muon, hidden_matrices

WARMUP_STEPS = 200
LOG_EVERY = 50
SAVE_EVERY_S = 60.0
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How long to train. `total_minutes` shapes the learning rate, `minutes` is this piece of it.

    `muon` is the blocks' learning rate over that of the rest; 0 trains everything with AdamW."""

    out: Path
    minutes: float
    total_minutes: float
    learning_rate: float
    muon: float = 0.0
    resume: bool = False
    decay_from: float = 0.55
    ema_decay: float = 0.999


class Average:
    """Exponential moving average of a module's parameters, with a short memory at the start."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.mean = [parameter.detach().clone() for parameter in self.live]
        self.count = torch.zeros((), device=self.mean[0].device)  # a tensor: a CUDA graph would freeze a number

    @torch.no_grad()
    def update(self) -> None:
        keep = ((1 + self.count) / (10 + self.count)).clamp(max=self.decay)
        change = torch._foreach_sub(list(self.live), self.mean)
        torch._foreach_mul_(change, 1 - keep)
        torch._foreach_add_(self.mean, change)
        self.count += 1

    @torch.no_grad()
    def copy_to_module(self) -> None:
        """Puts the averaged weights in the module."""
        torch._foreach_copy_(list(self.live), self.mean)


def _optimizers(module: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the blocks' matrices if asked for. Rates are tensors, so that CUDA graphs read them anew."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = trained[0].device
    matrices = hidden_matrices(module) if plan.muon else []
    rest = [p for p in trained if all(p is not matrix for matrix in matrices)]
    groups: list[dict[str, object]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    for group in groups:
        group["lr"] = torch.zeros((), device=device)
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True, capturable=device.type == "cuda")
    return [adam, Muon(matrices, lr=torch.zeros((), device=device))] if matrices else [adam]


@dataclass(kw_only=True)
class Run:
    """Everything that a checkpoint keeps."""

    module: nn.Module
    plan: Plan
    step: int = 0
    elapsed_s: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizers = _optimizers(self.module, self.plan)
        self.average = Average(self.module, self.plan.ema_decay)
        self.plan.out.mkdir(parents=True, exist_ok=True)
        if self.plan.resume and self.path.exists():
            self.load()

    @property
    def path(self) -> Path:
        return self.plan.out / "resume.pt"

    @property
    def progress(self) -> float:
        """Share of the whole time budget that is used up."""
        return self.elapsed_s / (self.plan.total_minutes * 60)

    def save(self) -> None:
        """Writes the checkpoint beside its old version first, so that a cut run never leaves half a file."""
        state = {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
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
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch._foreach_copy_(self.average.mean, state["mean"])
        self.step, self.elapsed_s, self.log = state["step"], state["elapsed_s"], state["log"]
        self.average.count.fill_(self.step)


def update(run: Run, loss_of: Step) -> Tensor:
    """One whole update of the weights and of their average. `loss_of` gives one or several losses to add up; they are
    returned. Nothing waits for the GPU, so that a CUDA graph can hold it all."""
    run.module.zero_grad(set_to_none=True)
    losses = loss_of()
    losses.sum().backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.module.parameters(), LARGEST_GRADIENT)
    for optimizer in run.optimizers:
        optimizer.step()
    run.average.update()
    return losses.detach()


def learning_rate(plan: Plan, step: int, progress: float) -> float:
    """Linear warm-up, a plateau, then linear decay to zero by the end of the time budget."""
    remaining = (1 - progress) / (1 - plan.decay_from)
    return plan.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS, max(remaining, 0.0))


def _set_rates(run: Run) -> None:
    rate = learning_rate(run.plan, run.step, run.progress)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"].fill_(rate * run.plan.muon if isinstance(optimizer, Muon) else rate)


def _record(run: Run, losses: list[Tensor]) -> None:
    """Logs the mean of the first loss as "loss", that of others as "loss 2" and so on."""
    first, *more = torch.stack([loss.reshape(-1) for loss in losses]).mean(0).tolist()
    if not math.isfinite(first + sum(more)):
        raise FloatingPointError(f"the losses are {[first, *more]} after step {run.step}; lower the learning rate")
    point = {"step": run.step, "elapsed_s": round(run.elapsed_s, 1), "loss": first}
    run.log.append(point | {f"loss {number}": loss for number, loss in enumerate(more, start=2)})
    if run.step % (10 * LOG_EVERY) == 0 or run.step == LOG_EVERY:
        print(f"{run.plan.out.name} step {run.step} {run.elapsed_s:.0f} s losses {first:.5f} {more}", flush=True)


def fit(run: Run, step: Step, max_steps: int | None = None) -> None:
    """Calls `step` (an `update`) until this piece's minutes, the whole budget or `max_steps` is used up, then saves."""
    before_s, start_s, saved_s = run.elapsed_s, time.monotonic(), time.monotonic()
    end_s = min(before_s + run.plan.minutes * 60, run.plan.total_minutes * 60)
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
