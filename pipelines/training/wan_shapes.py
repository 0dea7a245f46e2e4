"""Trains wan-shapes: `python -m pipelines.training.wan_shapes --vae DIR/vae --out DIR --minutes 8 --resume`.

Flow matching with dropped prompts, so that classifier-free guidance with an empty negative prompt works.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipelines.training.draw import draw
from pipelines.training.export import export_wan
from pipelines.training.fast import eager_step, slow_down, speed_up
from pipelines.training.flow import noisy, sample_sigma
from pipelines.training.loop import Plan, Run, fit
from pipelines.training.pool import Captioned, LatentPool, captioned_motions, token_ids, with_dropout
from pipelines.training.tokens import sentence_pieces
from pipelines.training.wan_model import FLOW_SHIFT, NUM_FRAMES, SIDE_PX, WanModel

REFRESH_EVERY = 6


class Data:
    """The latent pool and the captions' tokens."""

    def __init__(
        self,
        motions: Captioned,
        vae: AutoencoderKLWan,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pool: int,
        chunk: int,
        device: str,
    ) -> None:
        self.vae, self.drawings, self.device = vae, motions.drawings.to(device), device
        self.tokenizer = tokenizer
        self.ids = token_ids(self.tokenizer, motions.captions).to(device)
        self.empty, self.steps = len(motions.captions), 0
        self.mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self.std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self.pool = LatentPool(self._encode, num_rows=self.empty, size=pool, chunk=chunk, device=device)

    def _encode(self, row: Tensor) -> Tensor:
        pixels = draw(self.drawings[row], height=SIDE_PX, width=SIDE_PX, num_frames=NUM_FRAMES)
        with torch.autocast(self.device, torch.bfloat16):
            mean: Tensor = self.vae.encode(pixels).latent_dist.mean
        return (mean.float() - self.mean) / self.std

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        """Latents and the rows of their captions, some of them the empty prompt's."""
        self.steps += 1
        if self.steps % REFRESH_EVERY == 0:
            self.pool.refresh()
        latents, row = self.pool.sample(batch)
        return latents, with_dropout(row, self.empty)


def flow_loss(model: WanModel, data: Data, batch: int) -> Tensor:
    """Squared error of the velocity."""
    latents, row = data.sample(batch)
    sigma_B = sample_sigma(batch, FLOW_SHIFT, latents.device)
    noised, velocity = noisy(latents, sigma_B)
    return (model.velocity(noised, sigma_B, model.text(data.ids[row])) - velocity).square().mean()


def untrained(motions: Captioned) -> tuple[WanModel, PreTrainedTokenizerBase]:
    """A new model, and a tokenizer made from the captions."""
    tokenizer = sentence_pieces(motions.captions[:50_000])
    return WanModel(tokenizer), tokenizer


def start(path: Path) -> tuple[WanModel, PreTrainedTokenizerBase]:
    """An exported pipeline's model and tokenizer, to train on from there."""
    pipeline: Any = WanPipeline.from_pretrained(path, torch_dtype=torch.float32)
    model = WanModel(pipeline.tokenizer)
    model.umt5.load_state_dict(pipeline.text_encoder.state_dict())
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model, pipeline.tokenizer


def train(args: argparse.Namespace) -> None:
    """Runs this piece of the training and exports the averaged model."""
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vae = AutoencoderKLWan.from_pretrained(args.vae).to(device).requires_grad_(False)
    motions = captioned_motions(args.captions, args.seed)
    model, tokenizer = start(args.start) if args.start else untrained(motions)
    data = Data(motions, vae, tokenizer, pool=args.pool, chunk=args.chunk, device=device)
    model.to(device)
    speed_up(model.transformer.blocks, device, dynamic=False)
    plan = Plan(
        out=args.out,
        minutes=args.minutes,
        total_minutes=args.total_minutes or args.minutes,
        learning_rate=args.learning_rate,
        resume=args.resume,
    )
    run = Run(module=model, plan=plan)
    fit(run, eager_step(model, lambda: flow_loss(model, data, args.batch)), args.max_steps)
    run.average.copy_to_module()
    slow_down(model)
    export_wan(args.export, model, vae, data.tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True, help="where the finished pipeline goes")
    parser.add_argument("--start", type=Path, help="go on from this exported pipeline instead of from nothing")
    parser.add_argument("--minutes", type=float, default=14.0, help="length of this piece")
    parser.add_argument("--total-minutes", type=float)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--captions", type=int, default=300_000)
    parser.add_argument("--pool", type=int, default=40_000)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
