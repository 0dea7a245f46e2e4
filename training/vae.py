"""Trains an auto-encoder on drawings: `python -m training.vae --model flux-shapes --minutes 2 --out DIR`.

Absolute and squared error plus a light pull of the posterior to a unit normal (Kingma & Welling, arXiv 1312.6114).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from torch.nn import functional

from training.fast import channels_last, prepare, speed_up_norms, undo_speed_up
from training.flux_shapes import model as flux_model
from training.loop import Budget, Run, fit, step_of
from training.options import budget_of, device_of, run_options
from training.pool import CaptionedDrawings, captioned_motions, captioned_stills
from training.shapes.draw import Drawings, draw
from training.shapes.scenes import SHAPES
from training.wan_shapes import model as wan_model

PICTURE_PX = 96
NUM_SCENES = 100_000
NUM_MEASURED = 64
EDGE_WEIGHT = 4.0
STARS = 0.4  # share of drawings that must show a star: its notches are the first thing to blur


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoencoderTask:
    """Differences between the auto-encoders of pictures and of videos."""

    build: Callable[[], nn.Module]
    scenes: Callable[[int, int], CaptionedDrawings]
    pixels: Callable[[Drawings], Tensor]
    decode: Callable[[Any, Tensor], Tensor]
    statistics: Callable[[Tensor], dict[str, Any]]
    batch: int
    kl_weight: float


def _decode_picture(vae: Any, latents: Tensor) -> Tensor:
    sample: Tensor = vae.decode(latents).sample
    return sample


def _decode_video(vae: Any, latents: Tensor) -> Tensor:
    """Decode frame by frame, like `AutoencoderKLWan.decode`, but without its clamp, which would stop gradients."""
    vae.clear_cache()
    latents = vae.post_quant_conv(latents)
    frames = []
    for index in range(latents.shape[2]):
        vae._conv_idx = [0]
        first = {"first_chunk": True} if index == 0 else {}
        frame = latents[:, :, index : index + 1]
        frames.append(vae.decoder(frame, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **first))
    vae.clear_cache()
    return torch.cat(frames, 2)


def _scalar_statistics(latents: Tensor) -> dict[str, Any]:
    return {"shift_factor": latents.mean().item(), "scaling_factor": 1 / latents.std().item()}


def _channel_statistics(latents: Tensor) -> dict[str, Any]:
    std, mean = torch.std_mean(latents.transpose(0, 1).flatten(1), dim=1)
    return {"latents_mean": mean.tolist(), "latents_std": std.tolist()}


def _video_pixels(drawings: Drawings) -> Tensor:
    """Draw whole clips: when the decoder is trained on shorter ones, its memory drifts in the frames that follow."""
    side = wan_model.SIDE_PX
    return draw(drawings, height=side, width=side, num_frames=wan_model.NUM_FRAMES)


@torch.no_grad()
def _initialise_gently(vae: Any) -> None:
    """Give the auto-encoder little sampling noise, and residual blocks that pass their input on."""
    moments = vae.quant_conv if isinstance(vae, AutoencoderKLWan) else vae.encoder.conv_out
    moments.weight[moments.weight.shape[0] // 2 :] *= 0.1
    moments.bias[moments.bias.shape[0] // 2 :] -= 4
    for child in vae.modules():
        if type(child).__name__ in ("ResnetBlock2D", "WanResidualBlock"):
            nn.init.zeros_(child.conv2.weight)
            nn.init.zeros_(child.conv2.bias)


TASKS = {
    "flux-shapes": AutoencoderTask(
        build=flux_model.build_vae,
        scenes=captioned_stills,
        pixels=lambda drawings: draw(drawings, height=PICTURE_PX, width=PICTURE_PX)[:, :, 0],
        decode=_decode_picture,
        statistics=_scalar_statistics,
        batch=32,
        kl_weight=3e-4,
    ),
    "wan-shapes": AutoencoderTask(
        build=wan_model.build_vae,
        scenes=captioned_motions,
        pixels=_video_pixels,
        decode=_decode_video,
        statistics=_channel_statistics,
        batch=16,
        kl_weight=5e-5,
    ),
}


def _emphasis(pixels: Tensor) -> Tensor:
    """Return weights (N, 1, ..., height, width) of mean 1, larger near edges: there a small star becomes a circle."""
    frames = pixels.flatten(1, -3)  # max pooling takes channels and frames alike
    spread = functional.max_pool2d(frames, 5, 1, 2) + functional.max_pool2d(-frames, 5, 1, 2)
    weight = 1 + EDGE_WEIGHT * spread.view_as(pixels).amax(1, keepdim=True)
    return weight / weight.mean()


def _loss(task: AutoencoderTask, vae: Any, pixels: Tensor) -> Tensor:
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.is_cuda):
        posterior = vae.encode(pixels).latent_dist
        decoded = task.decode(vae, posterior.sample()).float()
    mean, log_variance = posterior.mean.float(), posterior.logvar.float()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    error = decoded - pixels
    loss: Tensor = (_emphasis(pixels) * (error.abs() + error.square())).mean() + task.kl_weight * kl
    return loss


@torch.no_grad()
def _finish(task: AutoencoderTask, vae: Any, drawings: Drawings, out: Path, *, keep_statistics: bool) -> None:
    row = torch.arange(min(NUM_MEASURED, len(drawings.background_N)), device=drawings.background_N.device)
    pixels = task.pixels(drawings[row])
    latents = vae.encode(pixels).latent_dist.mean
    error = task.decode(vae, latents).clamp(-1, 1) - pixels
    decibel = -10 * (error.square().mean() / 4).log10().item()
    statistics = task.statistics(latents)
    print(f"{out.name} PSNR {decibel:.2f} dB {statistics}", flush=True)
    if not keep_statistics:
        vae.register_to_config(**statistics)
    vae.save_pretrained(out / "vae")


def _untrained(task: AutoencoderTask, start: Path | None) -> Any:
    vae: Any = task.build()
    if start is None:
        _initialise_gently(vae)
        return vae
    return type(vae).from_pretrained(start)


def _sample_rows(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randint(len(rows), (count,), device=rows.device)]


def _trainable(vae: Any, *, decoder_only: bool) -> None:
    """Freeze the encoder if asked to, so that a transformer trained on its latents stays valid."""
    if decoder_only:
        for part in (vae.encoder, vae.quant_conv):
            if part is not None:
                part.requires_grad_(False)


def train(budget: Budget, args: argparse.Namespace) -> None:
    """Train, measure the latents' statistics and write `out/vae` in diffusers' layout (float32)."""
    prepare(args.seed)
    task, (device, graph) = TASKS[args.model], device_of(args)
    drawings = task.scenes(NUM_SCENES if device == "cuda" else 1000, args.seed).drawings.to(device)
    every = torch.arange(len(drawings.background_N), device=device)
    stars = every[(drawings.shape_NI == SHAPES.index("star")).any(1)]
    module = _untrained(task, args.start).to(device)
    _trainable(module, decoder_only=args.decoder_only)
    run, size = Run(module=module, budget=budget), args.batch or task.batch

    def loss_of() -> Tensor:
        row = torch.where(torch.rand(size, device=device) < STARS, _sample_rows(stars, size), _sample_rows(every, size))
        return _loss(task, run.module, task.pixels(drawings[row]))

    if device == "cuda":
        channels_last(run.module)
        speed_up_norms(run.module)
    fit(run, step_of(run, loss_of, graph=graph), args.max_steps)
    run.use_average()
    undo_speed_up(run.module)
    _finish(task, run.module.eval(), drawings, budget.out, keep_statistics=args.decoder_only)


def main() -> None:
    parser = run_options(__doc__, minutes=2.5, learning_rate=2e-3)
    parser.add_argument("--decoder-only", action="store_true", help="keep the latents as they are")
    parser.add_argument("--model", choices=sorted(TASKS), required=True)
    args = parser.parse_args()
    train(budget_of(args, args.out, ema_decay=0.99), args)


if __name__ == "__main__":
    main()
