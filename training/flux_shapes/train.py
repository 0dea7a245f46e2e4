"""Flow matching from noise to pictures, then guidance distillation."""

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import Tensor

from training.export import export_flux
from training.fast import TensorFunction, prepare, speed_up, uncompiled, undo_speed_up
from training.flow import noisy, sample_sigma
from training.flux_shapes.data import PictureDataset, Shown, Tokenizers
from training.flux_shapes.model import FluxModel, shift_of
from training.latents import pack
from training.loop import Run, fit, step_of
from training.options import budget_of, device_of
from training.pool import captioned_stills
from training.shapes.tokens import byte_pairs, load_for_tokens, sentence_pieces

GUIDANCE = (1.0, 5.0)
NUM_MERGES = 1000  # captions in free wording have a few hundred words


def noised(latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents at noise levels that suit their size, the velocity there, and the levels (B,)."""
    num_tokens = latents.shape[-1] * latents.shape[-2] // 4
    sigma_B = sample_sigma(len(latents), shift_of(num_tokens), latents.device)
    return *noisy(latents, sigma_B), sigma_B


def flow_loss(model: FluxModel, data: PictureDataset, args: argparse.Namespace, shown: Shown) -> Tensor:
    """Return the squared error of the velocity at guidance 1, and the reader's loss (2,)."""
    latents, row = data.sample(shown.size, shown.batch(args.batch))
    noisy_latents, velocity, sigma_B = noised(latents)
    text = model.text(*data.words(row, shown.num_tokens))
    error = model.velocity(noisy_latents, sigma_B, torch.ones_like(sigma_B), text) - pack(velocity)
    return torch.stack((error.square().mean(), args.reading * model.reader.loss(text[1], data.labels[row])))


def distillation_loss(
    model: FluxModel, teacher: FluxModel, data: PictureDataset, args: argparse.Namespace, shown: Shown
) -> Tensor:
    """Return the squared error to the teacher's guided velocity, at a random guidance scale. The teacher reads short
    prompts, whatever the model reads."""
    latents, row = data.sample(shown.size, shown.batch(args.batch))
    noisy_latents, _, sigma_B = noised(latents)
    guidance_B = torch.empty_like(sigma_B).uniform_(*GUIDANCE)

    def taught(rows: Tensor) -> Tensor:
        return teacher.velocity(noisy_latents, sigma_B, torch.ones_like(sigma_B), model.text(*data.words(rows)))

    with torch.no_grad():
        unguided = taught(row.new_full(row.shape, data.empty))
        guided = unguided + guidance_B[:, None, None] * (taught(row) - unguided)
        text = model.text(*data.words(row, shown.num_tokens))
    return (model.velocity(noisy_latents, sigma_B, guidance_B, text) - guided).square().mean()


def accelerate(model: FluxModel, device: str) -> FluxModel:
    """Compile static shapes for the text and the first picture size, then dynamic ones for all others together."""
    speed_up([*model.t5.encoder.block, *model.clip_layers], device, dynamic=False)
    speed_up(
        [*model.transformer.transformer_blocks, *model.transformer.single_transformer_blocks], device, dynamic=None
    )
    return model


def step_of_kinds(
    run: Run, data: PictureDataset, loss_of: Callable[[Shown], Tensor], *, everything: bool, graph: bool
) -> TensorFunction:
    """Return a step that shows one size or length after the other, each a graph of its own."""

    def loss(shown: Shown) -> Tensor:
        with uncompiled(on=shown.is_long):
            return loss_of(shown)

    steps = {shown: step_of(run, partial(loss, shown), graph=graph) for shown in data.kinds}
    return lambda: steps[data.next_shown(1.0 if everything else run.progress)]()


def match_flow(
    model: FluxModel, data: PictureDataset, args: argparse.Namespace, loss_of: Callable[[Shown], Tensor]
) -> Run:
    """Train all of the model, and leave the averaged weights in it."""
    device, graph = device_of(args)
    run = Run(module=accelerate(model, device), budget=budget_of(args, args.out / "flow"))
    fit(run, step_of_kinds(run, data, loss_of, everything=bool(args.start), graph=graph), args.max_steps)
    run.use_average()
    return run


def frozen(model: FluxModel) -> FluxModel:
    """Return a copy of the model as it was before `accelerate`."""
    copied = copy.deepcopy(model).requires_grad_(False)
    undo_speed_up(copied)
    return copied


def distillation(model: FluxModel, args: argparse.Namespace) -> Run:
    """Return a run that trains the transformer alone, for `args.distill_minutes`."""
    model.requires_grad_(False)
    model.transformer.requires_grad_(True)
    budget = replace(
        budget_of(args, args.out / "distilled"),
        minutes=args.distill_minutes,
        total_minutes=args.distill_minutes,
        learning_rate=args.learning_rate / 2,
        decay_from=0.3,
    )
    return Run(module=model, budget=budget)


def distil(model: FluxModel, data: PictureDataset, args: argparse.Namespace, loss: Callable[..., Tensor]) -> None:
    """Train the transformer to be guided by its scale alone. ``loss`` is as ``distillation_loss``."""
    device, graph = device_of(args)
    teacher = accelerate(frozen(model), device)
    run = distillation(model, args)
    loss_of = partial(loss, model, teacher, data, args)
    fit(run, step_of_kinds(run, data, loss_of, everything=True, graph=graph), args.max_steps)
    run.use_average()


def tokenizers_of(captions: list[str]) -> Tokenizers:
    """Return CLIP's and T5's tokenizers, made from captions."""
    pieces = sentence_pieces(captions[:50_000], ignore_case=True)
    return byte_pairs(captions[:20_000], num_merges=NUM_MERGES), pieces


def start(path: Path, tokenizers: Tokenizers | None = None) -> tuple[FluxModel, Tokenizers]:
    """Return an exported pipeline's model, to train on from there, and its tokenizers. With other tokenizers, tokens
    that it had keep their embeddings."""
    pipeline: Any = FluxPipeline.from_pretrained(path, torch_dtype=torch.float32)
    olds = pipeline.tokenizer, pipeline.tokenizer_2
    news = tokenizers or olds
    model = FluxModel(*news)
    load_for_tokens(model.clip, pipeline.text_encoder, olds[0], news[0])
    load_for_tokens(model.t5, pipeline.text_encoder_2, olds[1], news[1])
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model, news


def train(args: argparse.Namespace) -> None:
    """Run this piece of the training; export the averaged model before and after distillation."""
    prepare(args.seed)
    device, graph = device_of(args)
    vae = AutoencoderKL.from_pretrained(args.vae).to(device).requires_grad_(False)
    stills = captioned_stills(args.captions, args.seed)
    tokenizers = tokenizers_of(stills.captions)
    model = start(args.start, tokenizers)[0] if args.start else FluxModel(*tokenizers)
    data = PictureDataset(stills, vae, tokenizers, pool=args.pool, chunk=args.chunk, device=device, graph=graph)
    run = match_flow(model.to(device), data, args, partial(flow_loss, model, data, args))
    export_flux(args.out / "undistilled", frozen(model), copy.deepcopy(vae), *tokenizers)
    if run.progress >= 1 or args.max_steps:
        distil(model, data, args, distillation_loss)
        export_flux(args.export, frozen(model), vae, *tokenizers)
