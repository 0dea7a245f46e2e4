"""Distil flux-shapes to few steps: `python -m training.flux_shapes.few_steps --out DIR --export DIR --minutes 12`.

The result is a LoRA adapter (Hu et al., arXiv 2106.09685). One step of the student learns the mean velocity of several
steps of the teacher from the same latents, as in progressive distillation (Salimans and Ho, arXiv 2202.00512). Half of
the latents lie on the teacher's paths, half on the student's own, so that it learns to correct its errors.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from training.fast import prepare, speed_up
from training.flux_shapes.data import MAIN_SIZE, SIZES, Size
from training.flux_shapes.model import FluxModel, build_scheduler
from training.flux_shapes.train import start
from training.latents import pack, unpack
from training.loop import Run, fit, step_of
from training.options import budget_of, device_of, run_options
from training.pool import captioned_stills, token_ids

CHECKPOINT = Path(__file__).parents[2] / "pipelines" / "checkpoints" / "flux-shapes"
NAME = "four-steps"
GUIDANCE = 3.5
CHANNELS, SCALE = 16, 8
LAYERS = (
    "to_[qkv]",
    r"to_out\.0",
    "add_[qkv]_proj",
    "to_add_out",
    r"net\.0\.proj",
    r"net\.2",
    "linear",
    "proj_(mlp|out)",
)
ADAPTED = rf"(single_)?transformer_blocks\..*\.({'|'.join(LAYERS)})"
"""Every linear layer of the blocks."""
MAIN_SHARE = 0.7
"""Share of the steps that show the main size."""
NUM_ROUNDS = 32
"""Rounds of lessons in the store of each size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """Starts of the student's steps, in a batch of one size, and what the teacher does from there."""

    latents_BCHW: Tensor
    sigma_B: Tensor
    velocity_BSD: Tensor
    row_B: Tensor


def noise_levels(size: Size, num_steps: int) -> Tensor:
    """Return the pipeline's noise levels (`num_steps` + 1) for pictures of this size; the last is 0."""
    scheduler = build_scheduler()
    num_tokens = size[0] * size[1] // (2 * SCALE) ** 2
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps).tolist(), mu=calculate_shift(num_tokens))
    levels: Tensor = scheduler.sigmas
    return levels


class Lessons:
    """The newest lessons of each size. `teacher` and `student` have the same text encoders."""

    def __init__(self, teacher: FluxModel, student: FluxModel, args: argparse.Namespace, device: str) -> None:
        self.teacher, self.student, self.args, self.device = teacher, student, args, device
        self.rng, self.calls = random.Random(args.seed), 0
        captions = captioned_stills(args.captions, args.seed).captions
        self.clip_ids, self.t5_ids = (ids.to(device) for ids in (token_ids(one, captions) for one in args.tokenizers))
        self.store: dict[Size, deque[Lesson]] = {size: deque(maxlen=NUM_ROUNDS * args.num_steps) for size in SIZES}

    def text(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoded captions of these rows."""
        with torch.no_grad():
            return self.teacher.text(self.clip_ids[row_B], self.t5_ids[row_B])

    def velocity(self, model: FluxModel, latents_BCHW: Tensor, sigma_B: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        """Return the velocity (B, S, D) under guidance."""
        return model.velocity(latents_BCHW, sigma_B, torch.full_like(sigma_B, GUIDANCE), text)

    def next_size(self) -> Size:
        others = [size for size in SIZES if size != MAIN_SIZE]
        return MAIN_SIZE if self.rng.random() < MAIN_SHARE else self.rng.choice(others)

    @torch.no_grad()
    def refresh(self, size: Size) -> None:
        """Add lessons about new noise: for each step of the student, one."""
        batch, height, width = self.args.batch, size[0] // SCALE, size[1] // SCALE
        row_B = torch.randint(len(self.clip_ids) - 1, (batch,), device=self.device)
        text = self.text(row_B)
        latents = torch.randn(batch, CHANNELS, height, width, device=self.device)
        num_steps, parts = self.args.num_steps, self.args.teacher_steps // self.args.num_steps
        fine, half = noise_levels(size, num_steps * parts).tolist(), batch // 2
        for step in range(num_steps):
            levels = fine[step * parts : (step + 1) * parts + 1]
            sigma_B = torch.full((batch,), levels[0], device=self.device)
            end = latents
            for sigma, following in pairwise(levels):
                velocity = self.velocity(self.teacher, end, torch.full_like(sigma_B, sigma), text)
                end = end + (following - sigma) * unpack(velocity, height, width)
            mean = pack(end - latents) / (levels[-1] - levels[0])
            self.store[size].append(Lesson(latents_BCHW=latents, sigma_B=sigma_B, velocity_BSD=mean, row_B=row_B))
            own = self.velocity(self.student, latents[:half], sigma_B[:half], (text[0][:half], text[1][:half]))
            own = latents[:half] + (levels[-1] - levels[0]) * unpack(own, height, width)
            latents = torch.cat([own, end[half:]])

    def loss(self) -> Tensor:
        """Return the squared error of the student's velocity over a batch of lessons, some of them new."""
        size = self.next_size()
        if self.calls % self.args.refresh_every == 0 or not self.store[size]:
            self.refresh(size)
        self.calls += 1
        store, batch = self.store[size], self.args.batch
        index = torch.randint(len(store) * batch, (batch,)).tolist()
        examples = [(store[number // batch], number % batch) for number in index]
        latents = torch.stack([lesson.latents_BCHW[place] for lesson, place in examples])
        sigma_B = torch.stack([lesson.sigma_B[place] for lesson, place in examples])
        target = torch.stack([lesson.velocity_BSD[place] for lesson, place in examples])
        row_B = torch.stack([lesson.row_B[place] for lesson, place in examples])
        prediction = self.velocity(self.student, latents, sigma_B, self.text(row_B))
        return (prediction - target).square().mean()


def with_adapter(model: FluxModel, rank: int) -> FluxModel:
    """Return the model with an adapter, all of it frozen but the adapter."""
    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=ADAPTED, init_lora_weights=True)
    model.transformer.add_adapter(config)
    return model


def export(model: FluxModel, path: Path) -> None:
    """Write the adapter in diffusers' format, in float16."""
    layers = {name: tensor.half().cpu() for name, tensor in get_peft_model_state_dict(model.transformer).items()}
    FluxPipeline.save_lora_weights(path, transformer_lora_layers=layers, weight_name=f"{NAME}.safetensors")


def accelerate(model: FluxModel, device: str) -> FluxModel:
    blocks = [*model.transformer.transformer_blocks, *model.transformer.single_transformer_blocks]
    speed_up(blocks, device, dynamic=None)
    return model.to(device).eval()


def train(args: argparse.Namespace) -> None:
    """Run the training and export the averaged adapter."""
    if args.teacher_steps % args.num_steps:
        raise ValueError(
            f"teacher-steps is {args.teacher_steps}; it must be a multiple of num-steps, which is {args.num_steps}"
        )
    prepare(args.seed)
    device, _ = device_of(args)
    teacher, args.tokenizers = start(args.start)
    student = with_adapter(copy.deepcopy(teacher), args.rank)
    teacher.requires_grad_(False)
    lessons = Lessons(accelerate(teacher, device), accelerate(student, device), args, device)
    budget = replace(budget_of(args, args.out), decay_from=0.3)
    run = Run(module=student.transformer, budget=budget)
    fit(run, step_of(run, lessons.loss), args.max_steps)
    run.use_average()
    export(student, args.export)


def main() -> None:
    parser = run_options(__doc__, minutes=12.0, learning_rate=2e-3)
    parser.set_defaults(batch=16, start=CHECKPOINT)
    parser.add_argument("--export", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--captions", type=int, default=20_000)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-steps", type=int, default=4, help="of the student")
    parser.add_argument("--teacher-steps", type=int, default=20, help="a multiple of the student's")
    parser.add_argument("--refresh-every", type=int, default=10, help="training steps between new lessons")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
