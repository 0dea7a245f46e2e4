"""Trains flux-shapes: `python -m pipelines.training.flux_shapes --vae DIR/vae --out DIR --minutes 8 --resume`.

Two stages, each resumable: flow matching with dropped prompts, then guidance distillation (Meng et al., arXiv
2210.03142), after which the embedded guidance scale acts like classifier-free guidance.
"""

import argparse
import copy
import random
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipelines.training.draw import draw
from pipelines.training.export import export_flux
from pipelines.training.fast import eager_step, slow_down, speed_up
from pipelines.training.flow import noisy, sample_sigma
from pipelines.training.flux_model import FluxModel, pack, shift_of
from pipelines.training.loop import Plan, Run, fit
from pipelines.training.pool import Captioned, LatentPool, captioned_stills, token_ids, with_dropout
from pipelines.training.tokens import byte_pairs, sentence_pieces

SIZES = {(128, 128): 11, (96, 96): 2, (96, 128): 2, (128, 96): 2, (64, 64): 1, (160, 160): 2}
GUIDANCE = (1.0, 5.0)
REFRESH_EVERY = 4
Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]


class Data:
    """Latent pools of every size, and the captions' tokens."""

    def __init__(
        self, stills: Captioned, vae: AutoencoderKL, tokenizers: Tokenizers, *, pool: int, chunk: int, device: str
    ) -> None:
        self.vae, self.drawings = vae, stills.drawings.to(device)
        self.clip_tokenizer, self.t5_tokenizer = tokenizers
        self.clip_ids = token_ids(self.clip_tokenizer, stills.captions).to(device)
        self.t5_ids = token_ids(self.t5_tokenizer, stills.captions).to(device)
        self.empty = len(stills.captions)
        self.rng, self.steps = random.Random(0), 0
        self.pools = {size: self._pool(size, pool * weight // 20, chunk, device) for size, weight in SIZES.items()}

    def _pool(self, size: tuple[int, int], rows: int, chunk: int, device: str) -> LatentPool:
        def encode(row: Tensor) -> Tensor:
            pixels = draw(self.drawings[row], height=size[0], width=size[1])[:, :, 0]
            with torch.autocast(device, torch.bfloat16):
                mean: Tensor = self.vae.encode(pixels).latent_dist.mean
            scaled: Tensor = (mean.float() - self.vae.config.shift_factor) * self.vae.config.scaling_factor
            return scaled

        return LatentPool(encode, num_rows=self.empty, size=rows, chunk=chunk, device=device)

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        """Latents of one size and the rows of their captions, some of them the empty prompt's."""
        pool = self.pools[self.rng.choices(tuple(SIZES), tuple(SIZES.values()))[0]]
        self.steps += 1
        if self.steps % REFRESH_EVERY == 0:
            pool.refresh()
        latents, row = pool.sample(batch)
        return latents, with_dropout(row, self.empty)


def _noisy(latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = latents.shape[-1] * latents.shape[-2] // 4
    sigma_B = sample_sigma(len(latents), shift_of(num_tokens), latents.device)
    return *noisy(latents, sigma_B), sigma_B


def flow_loss(model: FluxModel, data: Data, batch: int) -> Tensor:
    """Squared error of the velocity at guidance 1."""
    latents, row = data.sample(batch)
    noised, velocity, sigma_B = _noisy(latents)
    text = model.text(data.clip_ids[row], data.t5_ids[row])
    return (model.velocity(noised, sigma_B, torch.ones_like(sigma_B), text) - pack(velocity)).square().mean()


def distillation_loss(model: FluxModel, teacher: FluxModel, data: Data, batch: int) -> Tensor:
    """Squared error to the teacher's guided velocity, at a random guidance scale."""
    latents, row = data.sample(batch)
    noised, _, sigma_B = _noisy(latents)
    guidance_B = torch.empty_like(sigma_B).uniform_(*GUIDANCE)
    with torch.no_grad():
        text = model.text(data.clip_ids[row], data.t5_ids[row])
        empty = row.new_full(row.shape, data.empty)
        nothing = model.text(data.clip_ids[empty], data.t5_ids[empty])
        one = torch.ones_like(sigma_B)
        unguided = teacher.velocity(noised, sigma_B, one, nothing)
        guided = unguided + guidance_B[:, None, None] * (teacher.velocity(noised, sigma_B, one, text) - unguided)
    return (model.velocity(noised, sigma_B, guidance_B, text) - guided).square().mean()


def _accelerate(model: FluxModel, device: str) -> FluxModel:
    blocks = [*model.transformer.transformer_blocks, *model.transformer.single_transformer_blocks]
    speed_up(blocks, device, dynamic=True)
    return model


def _stage_one(model: FluxModel, data: Data, args: argparse.Namespace, device: str) -> Run:
    plan = Plan(
        out=args.out / "flow",
        minutes=args.minutes,
        total_minutes=args.flow_minutes,
        learning_rate=args.learning_rate,
        resume=args.resume,
    )
    run = Run(module=_accelerate(model, device), plan=plan)
    fit(run, eager_step(model, lambda: flow_loss(model, data, args.batch)), args.max_steps)
    run.average.copy_to_module()
    return run


def _stage_two(model: FluxModel, data: Data, args: argparse.Namespace, device: str) -> None:
    slow_down(model)
    teacher = _accelerate(copy.deepcopy(model).requires_grad_(False), device)
    model.clip.requires_grad_(False)
    model.t5.requires_grad_(False)
    plan = Plan(
        out=args.out / "distilled",
        minutes=args.distill_minutes,
        total_minutes=args.distill_minutes,
        learning_rate=args.learning_rate / 2,
        resume=args.resume,
        decay_from=0.3,
    )
    run = Run(module=_accelerate(model, device), plan=plan)
    step = eager_step(model, lambda: distillation_loss(model, teacher, data, args.batch))
    fit(run, step, args.max_steps)
    run.average.copy_to_module()


def untrained(stills: Captioned) -> tuple[FluxModel, Tokenizers]:
    """A new model, and tokenizers made from the captions."""
    tokenizers = byte_pairs(stills.captions[:20_000]), sentence_pieces(stills.captions[:50_000])
    return FluxModel(*tokenizers), tokenizers


def start(path: Path) -> tuple[FluxModel, Tokenizers]:
    """An exported pipeline's model and tokenizers, to train on from there."""
    pipeline: Any = FluxPipeline.from_pretrained(path, torch_dtype=torch.float32)
    tokenizers = pipeline.tokenizer, pipeline.tokenizer_2
    model = FluxModel(*tokenizers)
    model.clip.load_state_dict(pipeline.text_encoder.state_dict())
    model.t5.load_state_dict(pipeline.text_encoder_2.state_dict())
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model, tokenizers


def train(args: argparse.Namespace) -> None:
    """Runs this piece of the training and exports the averaged model."""
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vae = AutoencoderKL.from_pretrained(args.vae).to(device).requires_grad_(False)
    stills = captioned_stills(args.captions, args.seed)
    model, tokenizers = start(args.start) if args.start else untrained(stills)
    data = Data(stills, vae, tokenizers, pool=args.pool, chunk=args.chunk, device=device)
    run = _stage_one(model.to(device), data, args, device)
    if run.elapsed_s >= args.flow_minutes * 60 or args.max_steps:
        _stage_two(model, data, args, device)
    slow_down(model)
    export_flux(args.export, model, vae, data.clip_tokenizer, data.t5_tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True, help="where the finished pipeline goes")
    parser.add_argument("--start", type=Path, help="go on from this exported pipeline instead of from nothing")
    parser.add_argument("--minutes", type=float, default=11.0, help="length of this piece of the first stage")
    parser.add_argument("--flow-minutes", type=float, default=11.0)
    parser.add_argument("--distill-minutes", type=float, default=3.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--captions", type=int, default=400_000)
    parser.add_argument("--pool", type=int, default=200_000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
