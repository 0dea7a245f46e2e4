"""Trains flux-shapes: `python -m training.flux_shapes --vae DIR/vae --out DIR --export DIR --minutes 8`.

Two stages, each resumable: flow matching with dropped prompts, then guidance distillation (Meng et al., arXiv
2210.03142), after which the embedded guidance scale acts like classifier-free guidance.
"""

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
from training.fast import TensorFunction, prepare, speed_up, undo_speed_up
from training.flow import noisy, sample_sigma
from training.flux_data import SIZES, PictureDataset, Size, Tokenizers
from training.flux_model import FluxModel, shift_of
from training.latents import pack
from training.loop import Run, fit, step_of
from training.options import budget_of, device_of, flow_options
from training.pool import CaptionedDrawings, captioned_stills
from training.shapes.tokens import byte_pairs, sentence_pieces

GUIDANCE = (1.0, 5.0)


def noised(latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns latents at noise levels that suit their size, the velocity there, and the levels (B,)."""
    num_tokens = latents.shape[-1] * latents.shape[-2] // 4
    sigma_B = sample_sigma(len(latents), shift_of(num_tokens), latents.device)
    return *noisy(latents, sigma_B), sigma_B


def flow_loss(model: FluxModel, data: PictureDataset, size: Size, args: argparse.Namespace) -> Tensor:
    """Returns the squared error of the velocity at guidance 1, and the reader's loss (2,)."""
    latents, row = data.sample(size, args.batch)
    noisy_latents, velocity, sigma_B = noised(latents)
    text = model.text(data.clip_ids[row], data.t5_ids[row])
    error = model.velocity(noisy_latents, sigma_B, torch.ones_like(sigma_B), text) - pack(velocity)
    return torch.stack((error.square().mean(), args.reading * model.reader.loss(text[1], data.labels[row])))


def distillation_loss(model: FluxModel, teacher: FluxModel, data: PictureDataset, size: Size, batch: int) -> Tensor:
    """Returns the squared error to the teacher's guided velocity, at a random guidance scale."""
    latents, row = data.sample(size, batch)
    noisy_latents, _, sigma_B = noised(latents)
    guidance_B = torch.empty_like(sigma_B).uniform_(*GUIDANCE)
    with torch.no_grad():
        text = model.text(data.clip_ids[row], data.t5_ids[row])
        empty = row.new_full(row.shape, data.empty)
        empty_text = model.text(data.clip_ids[empty], data.t5_ids[empty])
        one = torch.ones_like(sigma_B)
        unguided = teacher.velocity(noisy_latents, sigma_B, one, empty_text)
        guided = unguided + guidance_B[:, None, None] * (teacher.velocity(noisy_latents, sigma_B, one, text) - unguided)
    return (model.velocity(noisy_latents, sigma_B, guidance_B, text) - guided).square().mean()


def accelerate(model: FluxModel, device: str) -> FluxModel:
    """Compiles static shapes of the text and of the first picture size, then dynamic ones of all others together."""
    speed_up([*model.t5.encoder.block, *model.clip_layers], device, dynamic=False)
    speed_up(
        [*model.transformer.transformer_blocks, *model.transformer.single_transformer_blocks], device, dynamic=None
    )
    return model


def _step_of_sizes(
    run: Run, data: PictureDataset, loss_of: Callable[[Size], Tensor], *, all_sizes: bool, graph: bool
) -> TensorFunction:
    """Returns a step that takes pictures of one size after the other, each size a graph of its own."""
    steps = {size: step_of(run, partial(loss_of, size), graph=graph) for size in SIZES}
    return lambda: steps[data.next_size(1.0 if all_sizes else run.progress)]()


def _match_flow(model: FluxModel, data: PictureDataset, args: argparse.Namespace) -> Run:
    device, graph = device_of(args)
    run = Run(module=accelerate(model, device), budget=budget_of(args, args.out / "flow"))
    step = _step_of_sizes(
        run, data, lambda size: flow_loss(model, data, size, args), all_sizes=bool(args.start), graph=graph
    )
    fit(run, step, args.max_steps)
    run.use_average()
    return run


def frozen(model: FluxModel) -> FluxModel:
    """Returns a copy of the model as it was before `accelerate`."""
    copied = copy.deepcopy(model).requires_grad_(False)
    undo_speed_up(copied)
    return copied


def distillation(model: FluxModel, args: argparse.Namespace) -> Run:
    """Returns a run that trains the transformer alone, for `args.distill_minutes`."""
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


def _distil(model: FluxModel, data: PictureDataset, args: argparse.Namespace) -> None:
    device, graph = device_of(args)
    teacher = accelerate(frozen(model), device)
    run = distillation(model, args)

    def loss_of(size: Size) -> Tensor:
        return distillation_loss(model, teacher, data, size, args.batch)

    fit(run, _step_of_sizes(run, data, loss_of, all_sizes=True, graph=graph), args.max_steps)
    run.use_average()


def untrained(stills: CaptionedDrawings) -> tuple[FluxModel, Tokenizers]:
    """Returns a new model, and tokenizers made from the captions."""
    tokenizers = byte_pairs(stills.captions[:20_000]), sentence_pieces(stills.captions[:50_000])
    return FluxModel(*tokenizers), tokenizers


def start(path: Path) -> tuple[FluxModel, Tokenizers]:
    """Returns an exported pipeline's model and tokenizers, to train on from there."""
    pipeline: Any = FluxPipeline.from_pretrained(path, torch_dtype=torch.float32)
    tokenizers = pipeline.tokenizer, pipeline.tokenizer_2
    model = FluxModel(*tokenizers)
    model.clip.load_state_dict(pipeline.text_encoder.state_dict())
    model.t5.load_state_dict(pipeline.text_encoder_2.state_dict())
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model, tokenizers


def train(args: argparse.Namespace) -> None:
    """Runs this piece of the training; exports the averaged model before and after distillation."""
    prepare(args.seed)
    device, graph = device_of(args)
    vae = AutoencoderKL.from_pretrained(args.vae).to(device).requires_grad_(False)
    stills = captioned_stills(args.captions, args.seed)
    model, tokenizers = start(args.start) if args.start else untrained(stills)
    data = PictureDataset(stills, vae, tokenizers, pool=args.pool, chunk=args.chunk, device=device, graph=graph)
    run = _match_flow(model.to(device), data, args)
    export_flux(args.out / "undistilled", frozen(model), copy.deepcopy(vae), *tokenizers)
    if run.progress >= 1 or args.max_steps:
        _distil(model, data, args)
        export_flux(args.export, frozen(model), vae, *tokenizers)


def main() -> None:
    parser = flow_options(__doc__, minutes=11.0, batch=512, pool=200_000, chunk=512)
    parser.add_argument("--distill-minutes", type=float, default=3.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
