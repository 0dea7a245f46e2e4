"""Training fits the pipeline's own call, learns, and exports a model that diffusers and Troupe paint alike."""

import argparse
import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxPipeline
from PIL import Image
from safetensors.torch import load_file

from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures
from pipelines.run import load_pipeline
from training import loop
from training.evaluate import CHECKPOINTS
from training.flux_shapes import data as flux_data
from training.flux_shapes.data import LONG_LENGTH, Shown
from training.flux_shapes.model import POOLED_DIM, TEXT_DIM
from training.kontext_shapes import __main__ as trainer
from training.kontext_shapes.data import EditDataset, draw_pair, training_edits
from training.kontext_shapes.model import build_model, build_tokenizers
from training.loop import Budget, Run, fit, step_of

MOST_BYTES = 14_000_000
SMALL = (64, 64)
VAE = CHECKPOINTS / "flux-shapes" / "vae"
QUICK = "--max-steps 1 --batch 2 --captions 60 --pool 12 --chunk 2 --prompts 4 --eval-steps 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export one step of each stage. Return the folder."""
    out = tmp_path_factory.mktemp("kontext")
    precision = torch.get_float32_matmul_precision()
    cudnn, limit = torch.backends.cudnn.benchmark, torch._dynamo.config.recompile_limit
    sdp = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kontext", "--out", str(out), "--export", str(out / "model"), *QUICK.split()])
        trainer.main()
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark, torch._dynamo.config.recompile_limit = cudnn, limit
    torch.backends.cuda.enable_cudnn_sdp(sdp)
    return out / "model"


@pytest.fixture(autouse=True)
def quick_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one small size of pictures, and float32, which CPUs without bfloat16 compute a hundred times faster."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.ExitStack())
    monkeypatch.setattr(flux_data, "SIZES", {SMALL: 1})
    monkeypatch.setattr(flux_data, "MAIN_SIZE", SMALL)


def _dataset(count: int = 12) -> EditDataset:
    edits = training_edits(count, seed=0)
    vae = AutoencoderKL.from_pretrained(VAE, torch_dtype=torch.float32).requires_grad_(False)
    tokenizers = build_tokenizers(edits.before.captions)
    return EditDataset(edits, vae, tokenizers, pool=16, chunk=2, device="cpu", graph=False)


def test_the_velocity_is_what_the_pipeline_asks_its_transformer_for() -> None:
    torch.manual_seed(0)
    model = build_model(build_tokenizers(training_edits(20, seed=0).before.captions))
    torch.nn.init.normal_(model.transformer.proj_out.weight)
    latents, reference = torch.randn(2, 2, 16, 12, 8).unbind()
    sigma, guidance = torch.tensor([0.3, 0.8]), torch.tensor([1.0, 4.0])
    text = torch.randn(2, POOLED_DIM), torch.randn(2, 7, TEXT_DIM)
    ids = FluxKontextPipeline._prepare_latent_image_ids(2, 6, 4, "cpu", torch.float32)
    other_ids = ids.clone()
    other_ids[:, 0] = 1
    packed = [FluxPipeline._pack_latents(one, 2, 16, 12, 8) for one in (latents, reference)]
    with torch.no_grad():
        ours = model.velocity(latents, sigma, guidance, text, reference)
        theirs = model.transformer(
            hidden_states=torch.cat(packed, 1),
            encoder_hidden_states=text[1],
            pooled_projections=text[0],
            timestep=sigma,
            guidance=guidance,
            img_ids=torch.cat([ids, other_ids]),
            txt_ids=torch.zeros(7, 3),
        ).sample[:, :24]
        alone = model.velocity(latents, sigma, guidance, text)
    torch.testing.assert_close(ours, theirs)
    assert (alone - theirs).abs().max() > 0.01


def test_long_prompts_come_now_and_then_once_other_sizes_do() -> None:
    data, long = _dataset(), Shown(size=SMALL, num_tokens=LONG_LENGTH)
    early = [data.next_shown(0.0) for _ in range(40)]
    assert long not in early
    late = [data.next_shown(1.0) for _ in range(10 * EditDataset.long_every)]
    assert late.count(long) == 10
    assert long.batch(512) == 128
    row = torch.tensor([0, 3])
    (clip_ids, t5_ids), (short_clip, short_t5) = data.words(row, LONG_LENGTH), data.words(row)
    assert t5_ids.shape == (2, LONG_LENGTH)
    assert torch.equal(t5_ids[:, :48], short_t5)
    assert (t5_ids[:, 48:] == data.t5_tokenizer.pad_token_id).all()
    assert torch.equal(clip_ids, short_clip)


def test_the_reference_is_the_picture_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawings of a row before and after its edit are encoded, in this order."""
    data, rows = _dataset(), torch.arange(4)
    monkeypatch.setattr(data, "_encoded", lambda pixels: torch.nn.functional.avg_pool2d(pixels, 8))
    torch.manual_seed(1)
    latents = data._latents((64, 64), rows)
    torch.manual_seed(1)
    pixels = draw_pair(data.drawings[rows], data.after[rows], (64, 64))
    assert (pixels[:, 0] - pixels[:, 1]).abs().amax((1, 2, 3)).min() > 0.1
    for number in (0, 1):
        expected = torch.nn.functional.avg_pool2d(pixels[:, number], 8)
        torch.testing.assert_close(latents[:, number], expected)


@pytest.mark.slow
def test_training_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WARMUP_STEPS", 1)
    torch.manual_seed(0)
    data = _dataset(2)
    model = build_model((data.clip_tokenizer, data.t5_tokenizer))
    budget = Budget(out=tmp_path, minutes=5, total_minutes=5, learning_rate=1e-3, muon=2.0)
    run = Run(module=model, budget=budget)
    losses, loss_of = [], partial(trainer.flow_loss, model, data, argparse.Namespace(batch=2, reading=0.1))
    step = step_of(run, partial(loss_of, Shown(size=(64, 64))))

    def recorded() -> torch.Tensor:
        losses.append(step())
        return losses[-1]

    fit(run, recorded, max_steps=16)
    first, last = (torch.stack(part).mean(0) for part in (losses[:4], losses[-4:]))
    assert last[0] < 0.8 * first[0]
    assert last[1] < 0.8 * first[1]


def test_the_export_is_small_half_precision_and_says_what_it_is(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= MOST_BYTES
    weights = [load_file(file) for file in folder.rglob("*.safetensors")]
    assert {tensor.dtype for file in weights for tensor in file.values()} == {torch.float16}
    card = (folder / "README.md").read_text()
    assert "On 4 held-out edits" in card
    assert "{" not in card
    assert "_name_or_path" not in (folder / "vae" / "config.json").read_text(), "a place of the machine that trained it"
    scores = json.loads((folder.parent / "scores.json").read_text())
    assert scores["checks"]["done"]["prompts"] == 4
    assert scores["trained"]["steps"] == 1


def test_troupe_paints_what_diffusers_does(folder: Path) -> None:
    checkpoint = Checkpoint(folder, dtype="float32")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8))
    steps: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 2.5}
    own = FluxKontextPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    own.set_progress_bar_config(disable=True)
    size = {"height": 64, "width": 96, "max_area": 64 * 96, "_auto_resize": False, "max_sequence_length": 48}
    generator = torch.Generator().manual_seed(5)
    expected = own(image=image, prompt="make it blue", **steps, **size, generator=generator, output_type="np").images[0]
    request = checkpoint.defaults.request(prompt="make it blue", seed=5, width=96, height=64, **steps)
    pictures = InputPictures(pictures=(InputPicture.of(image),))
    ours = load_pipeline(checkpoint).run(request, pictures)[0]
    assert np.abs(ours - (expected * 255).round()).max() <= 1
    assert checkpoint.defaults.max_pictures == checkpoint.defaults.min_pictures == 1


@pytest.mark.slow
def test_an_exported_model_is_trained_on(folder: Path) -> None:
    model, tokenizers = trainer.start(argparse.Namespace(start=folder), [])
    shipped = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, weight in model.transformer.state_dict().items():
        assert torch.equal(weight, shipped[name].float())
    assert [len(tokenizer) for tokenizer in tokenizers] == [model.clip.config.vocab_size, model.t5.config.vocab_size]
