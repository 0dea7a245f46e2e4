"""Flow matching from noise to clips."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training.export import export_wan
from training.fast import TensorFunction, prepare, speed_up, uncompiled, undo_speed_up
from training.flow import noisy, sample_sigma
from training.loop import Run, fit, step_of
from training.options import budget_of, device_of
from training.pool import CaptionedDrawings, LatentPool, captioned_motions, token_ids, with_dropout
from training.shapes.draw import draw
from training.shapes.tokens import MAX_LENGTH, load_for_tokens, sentence_pieces
from training.wan_shapes.model import FLOW_SHIFT, NUM_FRAMES, SIDE_PX, WanModel

REFRESH_EVERY = 8
LONG_EVERY = 8  # one step in so many has longer prompts, and a smaller batch
LONG_LENGTHS = (512, 128, 512, 256)
LONG_SHARE = 2


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

    def next_length(self) -> int:
        """Return how many tokens the next step's prompts are padded to; now and then it draws new videos."""
        self.steps += 1
        if self.steps % REFRESH_EVERY == 0:
            self.pool.refresh()
        rounds, rest = divmod(self.steps, LONG_EVERY)
        return LONG_LENGTHS[rounds % len(LONG_LENGTHS)] if rest == 1 else MAX_LENGTH

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return latents and the rows of their captions, some of them the empty prompt's."""
        latents, row = self.pool.sample(batch)
        return latents, with_dropout(row, self.empty)


def flow_loss(model: WanModel, data: VideoDataset, args: argparse.Namespace, num_tokens: int = MAX_LENGTH) -> Tensor:
    """Return the squared error of the velocity, and the reader's loss (2,)."""
    batch = args.batch if num_tokens == MAX_LENGTH else max(args.batch // LONG_SHARE, 1)
    latents, row = data.sample(batch)
    sigma_B = sample_sigma(batch, FLOW_SHIFT, latents.device)
    noised, velocity = noisy(latents, sigma_B)
    text = model.text(data.ids[row], num_tokens)
    error = model.velocity(noised, sigma_B, text) - velocity
    read = model.reader.loss(text[:, :MAX_LENGTH], data.labels[row])
    return torch.stack((error.square().mean(), args.reading * read))


def _step_of_lengths(
    run: Run, model: WanModel, data: VideoDataset, args: argparse.Namespace, graph: bool
) -> TensorFunction:
    """Return a step that shows prompts of one length after the other, each a graph of its own."""

    def loss(num_tokens: int) -> Tensor:
        with uncompiled(on=num_tokens > MAX_LENGTH):
            return flow_loss(model, data, args, num_tokens)

    steps = {length: step_of(run, partial(loss, length), graph=graph) for length in {MAX_LENGTH, *LONG_LENGTHS}}
    return lambda: steps[data.next_length()]()


def start(path: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[WanModel, PreTrainedTokenizerBase]:
    """Return an exported pipeline's model, to train on from there, and its tokenizer. With another tokenizer, tokens
    that it had keep their embeddings."""
    pipeline: Any = WanPipeline.from_pretrained(path, torch_dtype=torch.float32)
    tokenizer = tokenizer or pipeline.tokenizer
    model = WanModel(tokenizer)
    load_for_tokens(model.umt5, pipeline.text_encoder, pipeline.tokenizer, tokenizer)
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model, tokenizer


def train(args: argparse.Namespace) -> None:
    """Run this piece of the training and export the averaged model."""
    prepare(args.seed)
    device, graph = device_of(args)
    vae = AutoencoderKLWan.from_pretrained(args.vae).to(device).requires_grad_(False)
    motions = captioned_motions(args.captions, args.seed)
    tokenizer = sentence_pieces(motions.captions[:50_000], ignore_case=True)
    model = start(args.start, tokenizer)[0] if args.start else WanModel(tokenizer)
    data = VideoDataset(motions, vae, tokenizer, pool=args.pool, chunk=args.chunk, device=device, graph=graph)
    model.to(device)
    speed_up([*model.transformer.blocks, *model.umt5.encoder.block], device, dynamic=False)
    run = Run(module=model, budget=budget_of(args, args.out))
    fit(run, _step_of_lengths(run, model, data, args, graph), args.max_steps)
    run.use_average()
    undo_speed_up(model)
    export_wan(args.export, model, vae, tokenizer)
