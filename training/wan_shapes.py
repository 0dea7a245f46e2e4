"""Trains wan-shapes: `python -m training.wan_shapes --vae DIR/vae --out DIR --export DIR --minutes 8`.

Flow matching with dropped prompts, so that classifier-free guidance with an empty negative prompt works.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training.export import export_wan
from training.fast import TensorFunction, prepare, speed_up, undo_speed_up
from training.flow import noisy, sample_sigma
from training.loop import Run, fit, step_of
from training.options import budget_of, device_of, flow_options
from training.pool import CaptionedDrawings, LatentPool, captioned_motions, token_ids, with_dropout
from training.shapes.draw import draw
from training.shapes.tokens import sentence_pieces
from training.wan_model import FLOW_SHIFT, NUM_FRAMES, SIDE_PX, WanModel

REFRESH_EVERY = 8


class VideoDataset:
    """The latent pool, and the captions' tokens and labels, all on the device."""

    def __init__(
        self,
        motions: CaptionedDrawings,
        vae: AutoencoderKLWan,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pool: int,
        chunk: int,
        device: str,
        graph: bool,
    ) -> None:
        self.vae, self.drawings, self.device = vae, motions.drawings.to(device), device
        self.ids = token_ids(tokenizer, motions.captions).to(device)
        self.labels = motions.labels.to(device)
        self.empty, self.steps = len(motions.captions), 0
        self.mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self.std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self.pool = LatentPool(self._encode, num_rows=self.empty, size=pool, chunk=chunk, device=device, graph=graph)

    def _encode(self, row: Tensor) -> Tensor:
        pixels = draw(self.drawings[row], height=SIDE_PX, width=SIDE_PX, num_frames=NUM_FRAMES)
        with torch.autocast(self.device, torch.bfloat16):
            mean: Tensor = self.vae.encode(pixels).latent_dist.mean
        return (mean.float() - self.mean) / self.std

    def refresh(self) -> None:
        """Draws new videos now and then. Trainers call it before every step."""
        self.steps += 1
        if self.steps % REFRESH_EVERY == 0:
            self.pool.refresh()

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        """Returns latents and the rows of their captions, some of them the empty prompt's."""
        latents, row = self.pool.sample(batch)
        return latents, with_dropout(row, self.empty)


def flow_loss(model: WanModel, data: VideoDataset, args: argparse.Namespace) -> Tensor:
    """Returns the squared error of the velocity, and the reader's loss (2,)."""
    latents, row = data.sample(args.batch)
    sigma_B = sample_sigma(args.batch, FLOW_SHIFT, latents.device)
    noised, velocity = noisy(latents, sigma_B)
    text = model.text(data.ids[row])
    error = model.velocity(noised, sigma_B, text) - velocity
    return torch.stack((error.square().mean(), args.reading * model.reader.loss(text, data.labels[row])))


def _refreshing_step(
    run: Run, model: WanModel, data: VideoDataset, args: argparse.Namespace, graph: bool
) -> TensorFunction:
    flow_step = step_of(run, lambda: flow_loss(model, data, args), graph=graph)

    def step() -> Tensor:
        data.refresh()
        return flow_step()

    return step


def untrained(motions: CaptionedDrawings) -> tuple[WanModel, PreTrainedTokenizerBase]:
    """Returns a new model, and a tokenizer made from the captions."""
    tokenizer = sentence_pieces(motions.captions[:50_000])
    return WanModel(tokenizer), tokenizer


def start(path: Path) -> tuple[WanModel, PreTrainedTokenizerBase]:
    """Returns an exported pipeline's model and tokenizer, to train on from there."""
    pipeline: Any = WanPipeline.from_pretrained(path, torch_dtype=torch.float32)
    model = WanModel(pipeline.tokenizer)
    model.umt5.load_state_dict(pipeline.text_encoder.state_dict())
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model, pipeline.tokenizer


def train(args: argparse.Namespace) -> None:
    """Runs this piece of the training and exports the averaged model."""
    prepare(args.seed)
    device, graph = device_of(args)
    vae = AutoencoderKLWan.from_pretrained(args.vae).to(device).requires_grad_(False)
    motions = captioned_motions(args.captions, args.seed)
    model, tokenizer = start(args.start) if args.start else untrained(motions)
    data = VideoDataset(motions, vae, tokenizer, pool=args.pool, chunk=args.chunk, device=device, graph=graph)
    model.to(device)
    speed_up([*model.transformer.blocks, *model.umt5.encoder.block], device, dynamic=False)
    run = Run(module=model, budget=budget_of(args, args.out))
    fit(run, _refreshing_step(run, model, data, args, graph), args.max_steps)
    run.use_average()
    undo_speed_up(model)
    export_wan(args.export, model, vae, tokenizer)


def main() -> None:
    train(flow_options(__doc__, minutes=14.0, batch=256, pool=20_000, chunk=32).parse_args())


if __name__ == "__main__":
    main()
