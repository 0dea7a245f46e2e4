"""Trains kontext-shapes: `python -m training.kontext_shapes --out DIR --export DIR/kontext-shapes --minutes 5`.

Flow matching from noise to the edited picture, with the picture that is edited as further image tokens (FLUX.1 Kontext,
arXiv 2506.15742), then guidance distillation as in `flux_shapes`, then the scores of held-out edits: the last line is
one JSON object. The auto-encoder is flux-shapes' unless another is given.
"""

import argparse
import json
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from torch import Tensor

from training.evaluate import CHECKPOINTS
from training.export import export_flux
from training.fast import prepare
from training.flux_shapes.data import Shown, Tokenizers
from training.flux_shapes.model import FluxModel
from training.flux_shapes.train import GUIDANCE, distil, frozen, match_flow, noised
from training.kontext_shapes.card import write_card
from training.kontext_shapes.data import EditDataset, training_edits
from training.kontext_shapes.evaluate import evaluate, evaluation_options
from training.kontext_shapes.model import build_model, build_tokenizers
from training.latents import pack
from training.options import device_of, flow_options

REFERENCE_NOISE = 0.1  # largest; a picture that was painted or edited before is not as clean as a drawing
CHANGE_WEIGHT = 3.0  # further weight of what an edit changes, which is little of the picture
CHANGED = 0.1


def _roughened(latents_BCHW: Tensor) -> Tensor:
    level = REFERENCE_NOISE * torch.rand(len(latents_BCHW), 1, 1, 1, device=latents_BCHW.device).square()
    return latents_BCHW + level * torch.randn_like(latents_BCHW)


def _emphasis(before_BCHW: Tensor, after_BCHW: Tensor) -> Tensor:
    """Return weights (B, S, 1) of mean 1, larger for the tokens that differ."""
    changed = pack((after_BCHW - before_BCHW).abs()).amax(-1, keepdim=True) > CHANGED
    weight = 1 + CHANGE_WEIGHT * changed
    return weight / weight.mean()


def flow_loss(model: FluxModel, data: EditDataset, args: argparse.Namespace, shown: Shown) -> Tensor:
    """Return the squared error of the velocity at guidance 1, and the reader's loss (2,)."""
    pairs, row = data.sample(shown.size, shown.batch(args.batch))
    before, after = pairs.unbind(1)
    noisy_latents, velocity, sigma_B = noised(after)
    text = model.text(*data.words(row, shown.num_tokens))
    predicted = model.velocity(noisy_latents, sigma_B, torch.ones_like(sigma_B), text, _roughened(before))
    error = (predicted - pack(velocity)).square() * _emphasis(before, after)
    return torch.stack((error.mean(), args.reading * model.reader.loss(text[1], data.labels[row])))


def distillation_loss(
    model: FluxModel, teacher: FluxModel, data: EditDataset, args: argparse.Namespace, shown: Shown
) -> Tensor:
    """Return the squared error to the teacher's guided velocity, at a random guidance scale. The teacher reads short
    prompts, whatever the model reads."""
    pairs, row = data.sample(shown.size, shown.batch(args.batch))
    before, after = pairs.unbind(1)
    noisy_latents, _, sigma_B = noised(after)
    reference, one = _roughened(before), torch.ones_like(sigma_B)
    guidance_B = torch.empty_like(sigma_B).uniform_(*GUIDANCE)

    def taught(rows: Tensor) -> Tensor:
        return teacher.velocity(noisy_latents, sigma_B, one, model.text(*data.words(rows)), reference)

    with torch.no_grad():
        unguided = taught(row.new_full(row.shape, data.empty))
        guided = unguided + guidance_B[:, None, None] * (taught(row) - unguided)
        text = model.text(*data.words(row, shown.num_tokens))
    error = model.velocity(noisy_latents, sigma_B, guidance_B, text, reference) - guided
    return error.square().mean()


def start(args: argparse.Namespace, instructions: list[str]) -> tuple[FluxModel, Tokenizers]:
    """Return a new model, or an exported one to train on from there, and its tokenizers."""
    if not args.start:
        tokenizers = build_tokenizers(instructions)
        return build_model(tokenizers), tokenizers
    pipeline: Any = FluxKontextPipeline.from_pretrained(args.start, torch_dtype=torch.float32)
    tokenizers = pipeline.tokenizer, pipeline.tokenizer_2
    model = build_model(tokenizers)
    model.clip.load_state_dict(pipeline.text_encoder.state_dict())
    model.t5.load_state_dict(pipeline.text_encoder_2.state_dict())
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model, tokenizers


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run this piece of the training, export the averaged model and return its scores on held-out edits."""
    prepare(args.seed)
    device, graph = device_of(args)
    vae = AutoencoderKL.from_pretrained(args.vae, torch_dtype=torch.float32).to(device).requires_grad_(False)
    edits = training_edits(args.captions, args.seed)
    model, tokenizers = start(args, edits.before.captions)
    data = EditDataset(edits, vae, tokenizers, pool=args.pool, chunk=args.chunk, device=device, graph=graph)
    run = match_flow(model.to(device), data, args, partial(flow_loss, model, data, args))
    if args.distill_minutes and (run.progress >= 1 or args.max_steps):
        distil(model, data, args, distillation_loss)
    export_flux(args.export, frozen(model), vae, *tokenizers, edits=True)
    options = {"checkpoint": args.export, "prompts": args.prompts, "steps": args.eval_steps}
    scores = evaluate(evaluation_options(**options, sheet=args.out / "sheet.png"))
    write_card(args.export, scores)
    scores |= {"trained": {"steps": run.step, "loss": run.log[-1]["loss"] if run.log else None}}
    (args.out / "scores.json").write_text(json.dumps(scores))
    return scores


def main() -> None:
    vae = CHECKPOINTS / "flux-shapes" / "vae"
    parser = flow_options(__doc__, minutes=5.0, batch=512, pool=80_000, chunk=256, vae=vae)
    parser.set_defaults(captions=150_000)
    parser.add_argument("--distill-minutes", type=float, default=1.2, help="0: none")
    parser.add_argument("--prompts", type=int, default=240, help="held-out edits to score")
    parser.add_argument("--eval-steps", type=int, default=20, help="steps of the pictures that are scored")
    print(json.dumps(train(parser.parse_args())))


if __name__ == "__main__":
    main()
